from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.ranks import run_ranks
from titanyaml.distributed import compat_compile
from titanyaml.errors import DataError
from titanyaml.loss import IGNORE_INDEX, CrossEntropy, chunk_loss, chunked_cross_entropy
from titanyaml.loss.task import HeadGradient

VOCAB, DIM = 53, 16
ALONE = ("", 0, 1)  # the operator's arguments for a weight that is whole


def inputs(dtype: torch.dtype = torch.float32, *, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [3, 7, D], weight [V, D] and labels with ignored ones at both ends."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, DIM, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, DIM, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab, (3, 7), generator=generator)
    labels[0, :4] = labels[2, -2:] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 21, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_plain_cross_entropy_for_any_chunk(chunk_tokens: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(dtype)
    loss = CrossEntropy(chunk_tokens)(hidden, weight, labels)
    expected = plain(hidden, weight, labels)
    assert loss.shape == () and loss.dtype == dtype
    torch.testing.assert_close(loss, expected)
    scale = torch.tensor(0.37, dtype=dtype)
    got = torch.autograd.grad(loss * scale, (hidden, weight))
    for actual_grad, expected_grad in zip(got, torch.autograd.grad(expected * scale, (hidden, weight)), strict=True):
        torch.testing.assert_close(actual_grad, expected_grad)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aot_eager", torch.float64), ("aot_eager", torch.bfloat16), ("inductor", torch.float32)],
    ids=str,
)
def test_compiled_equals_eager(backend: str, dtype: torch.dtype) -> None:
    """21 tokens in chunks of 8: two shapes, a graph each, and one more where no gradient is needed."""
    torch._dynamo.reset()
    hidden, weight, labels = inputs(dtype)
    results = []
    for compiled in ("", backend):
        loss = CrossEntropy(8, compiled=compiled)(hidden, weight, labels)
        results.append((loss, *torch.autograd.grad(loss * 0.37, (hidden, weight))))
    for actual_grad, expected_grad in zip(*results, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad)
    assert compat_compile.count_graphs_of(chunk_loss) == 2
    with torch.no_grad():
        torch.testing.assert_close(CrossEntropy(21, compiled=backend)(hidden, weight, labels), loss)
    assert compat_compile.count_graphs_of(chunk_loss) == 3


def test_gradcheck() -> None:
    hidden, weight, labels = inputs(torch.float64, vocab=11)
    assert torch.autograd.gradcheck(lambda h, w: CrossEntropy(5)(h, w, labels) * 0.3, (hidden, weight))


@pytest.mark.parametrize(("hidden_grad", "weight_grad"), [(True, False), (False, True)])
def test_only_what_requires_a_gradient_gets_one(hidden_grad: bool, weight_grad: bool) -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, labels), (hidden, weight))
    hidden.requires_grad_(hidden_grad)
    weight.requires_grad_(weight_grad)
    CrossEntropy(4)(hidden, weight, labels).backward()
    for tensor, needs_grad, gradient in ((hidden, hidden_grad, expected[0]), (weight, weight_grad, expected[1])):
        if needs_grad:
            torch.testing.assert_close(tensor.grad, gradient)
        else:
            assert tensor.grad is None


def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    hidden, weight, labels = inputs()
    loss = CrossEntropy(4)(hidden, weight, labels) / 7
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_all_ignored_is_zero_with_zero_gradients() -> None:
    hidden, weight, labels = inputs()
    loss = CrossEntropy(4)(hidden, weight, torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_bf16_sums_the_weight_gradient_in_float32() -> None:
    # 512 equal tokens: each adds the same to the weight, and a bf16 sum would stop growing after 256 of them
    hidden = torch.ones(1, 512, DIM, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(VOCAB, DIM, dtype=torch.bfloat16, requires_grad=True)
    loss = CrossEntropy(1)(hidden, weight, torch.zeros(1, 512, dtype=torch.int64))
    loss.backward()
    assert loss.dtype == torch.float32 and weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad[1:].float(), torch.full((VOCAB - 1, DIM), 512 / VOCAB), rtol=4e-3, atol=0)


@pytest.mark.parametrize("vocab", [1, 8, VOCAB, 64])
def test_the_head_gradient_is_rounded_within_half_of_its_sum(monkeypatch, vocab: int) -> None:
    monkeypatch.setattr(HeadGradient, "PIECE", 48)  # pieces that end within a row
    generator = torch.Generator().manual_seed(0)
    head, expected = HeadGradient(torch.empty(vocab, DIM, dtype=torch.bfloat16)), torch.zeros(vocab, DIM)
    for tokens in (5, 1, 9):
        grad, hidden = (torch.randn(tokens, n, generator=generator).bfloat16() for n in (vocab, DIM))
        head.add(grad, hidden)
        expected += grad.float().t() @ hidden.float()
    result = head.rounded()
    assert result.is_contiguous() and torch.equal(result, expected.bfloat16())
    assert result.untyped_storage().nbytes() <= 4 * DIM * (vocab // 2 + 8) and not head.sums


class Recorder(TorchDispatchMode):
    """Sizes of all tensors that operators return, and names of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.sizes.extend(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_all_logits_is_made(dtype: torch.dtype) -> None:
    tokens, vocab, dim, chunk = 256, 2048, 8, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=generator).to(dtype)
    weight = torch.randn(vocab, dim, generator=generator).to(dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    with Recorder() as recorder:
        chunked_cross_entropy(hidden, weight, labels, chunk, IGNORE_INDEX, True, True, *ALONE)
    assert max(recorder.sizes) == chunk * vocab  # 1/16 of [tokens, V]
    with Recorder() as reference:
        plain(hidden.view(1, tokens, dim), weight, labels)
    assert max(reference.sizes) == tokens * vocab


def test_without_gradients_no_gradient_work_is_done() -> None:
    hidden, weight, labels = inputs()
    with Recorder() as recorder:
        loss, *gradients = chunked_cross_entropy(
            hidden.detach().flatten(0, 1), weight.detach(), labels.flatten(), 4, IGNORE_INDEX, False, False, *ALONE
        )
    assert not recorder.names & {"addmm_", "addmm", "scatter_", "exp"} and [g.numel() for g in gradients] == [0, 0]
    with torch.no_grad():
        evaluated = CrossEntropy(4)(hidden, weight, labels)
    assert not evaluated.requires_grad and torch.equal(evaluated, loss)
    torch.testing.assert_close(loss, plain(hidden, weight, labels).detach())


@pytest.mark.parametrize("label", [VOCAB, -1, -101])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    hidden, weight, labels = inputs()
    labels[1, 3] = label
    with pytest.raises(DataError, match=f"label {label} is outside the vocabulary of {VOCAB} ids"):
        CrossEntropy(4)(hidden, weight, labels)


def test_another_ignore_index_is_honoured() -> None:
    hidden, weight, labels = inputs()
    relabelled = labels.where(labels != IGNORE_INDEX, 7777)
    torch.testing.assert_close(CrossEntropy(4, 7777)(hidden, weight, relabelled), plain(hidden, weight, labels))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    loss_fn = CrossEntropy(4)

    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return loss_fn(hidden.tanh(), weight, labels) / 17

    hidden, weight, labels = inputs()
    expected = step(hidden, weight, labels)
    wanted_grads = torch.autograd.grad(expected, (hidden, weight))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)(hidden, weight, labels)
    torch.testing.assert_close(compiled, expected)
    for actual_grad, expected_grad in zip(torch.autograd.grad(compiled, (hidden, weight)), wanted_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad)


def test_operator_contract_and_fake_tensors() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    arguments = (hidden.detach().flatten(0, 1), weight.detach(), labels.flatten(), 4, IGNORE_INDEX, True, True, *ALONE)
    torch.library.opcheck(torch.ops.titanyaml.chunked_cross_entropy.default, arguments)
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t) for t in (hidden, weight, labels)]
    with mode:
        loss = CrossEntropy(4)(*fake)
        loss.backward()
    assert loss.dtype == torch.float32 and fake[1].grad.shape == weight.shape


def test_flop_counter_sees_the_three_products() -> None:
    hidden, weight, labels = inputs()
    with FlopCounterMode(display=False) as counter:
        CrossEntropy(4)(hidden, weight, labels).backward()
    assert counter.get_total_flops() == 3 * 2 * 21 * VOCAB * DIM


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bf16_on_cuda_neither_rounds_logits_nor_stalls() -> None:
    hidden, weight, labels = (t.detach().cuda() for t in inputs(torch.bfloat16, vocab=1024))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    CrossEntropy(4)(hidden, weight, labels).backward()  # libraries may synchronise when first loaded
    hidden.grad = weight.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = CrossEntropy(4)(hidden, weight, labels)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = plain(*wide, labels)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for actual_grad, expected_grad in zip((hidden, weight), wide, strict=True):
        error = (actual_grad.grad.double() - expected_grad.grad).norm() / expected_grad.grad.norm()
        assert error < 5e-3


def sharded(rank: int, chunk_tokens: int, scale: float, compiled: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, this rank's summand of the hidden states' gradient, and the whole gradient of the sharded weight."""
    hidden, weight, labels = inputs(torch.float64, vocab=54)
    weight = (weight.detach() * scale).requires_grad_()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    shards = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    loss = CrossEntropy(chunk_tokens, compiled=compiled)(hidden, shards, labels)
    loss.backward()
    with torch.no_grad():
        assert torch.equal(CrossEntropy(chunk_tokens)(hidden, shards, labels), loss)
    return loss.detach(), hidden.grad, shards.grad.full_tensor()


@pytest.mark.parametrize(
    ("ranks", "chunk_tokens", "scale", "compiled"),
    [(2, 4, 1.0, ""), (3, 1000, 1.0, ""), (2, 7, 300.0, ""), (2, 7, 300.0, "aot_eager")],
)
def test_rows_of_the_vocabulary_on_several_ranks(ranks: int, chunk_tokens: int, scale: float, compiled: str) -> None:
    """With logits of thousands (scale 300) only a maximum over all ranks keeps the sum finite."""
    hidden, weight, labels = inputs(torch.float64, vocab=54)
    weight = (weight.detach() * scale).requires_grad_()
    expected = plain(hidden, weight, labels)
    expected.backward()
    losses, hidden_grads, weight_grads = zip(*run_ranks(sharded, ranks, chunk_tokens, scale, compiled), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0], expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(sum(hidden_grads), hidden.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight_grads[0], weight.grad, rtol=1e-12, atol=1e-12)


def sharded_bad_label(rank: int, label: int) -> str:
    hidden, weight, labels = inputs(vocab=54)
    labels[1, 3] = label
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(DataError) as error:
        CrossEntropy(4)(hidden, distribute_tensor(weight.detach(), mesh, [Shard(0)]), labels)
    return error.value.message


@pytest.mark.parametrize("label", [-1, 54])
def test_a_label_that_no_rank_owns(label: int) -> None:
    message = f"label {label} is outside the vocabulary of 54 ids"
    assert run_ranks(sharded_bad_label, 2, label) == [message, message]
