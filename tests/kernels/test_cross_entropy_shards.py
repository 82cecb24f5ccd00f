"""The cross-entropy of logits whose columns lie on several ranks: shards in one process, and ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.kernels.references import cross_entropy_reference_
from tests.kernels.test_cross_entropy import IGNORE, inputs
from tests.ranks import run_ranks
from titanyaml import machine
from titanyaml.kernels import cross_entropy
from titanyaml.kernels.cross_entropy import shard_log_sum_exps, sharded_cross_entropy_
from titanyaml.loss import CrossEntropy

VOCAB = 200
#: Ends of the shards: two and three, uneven, and one that is smaller than a block.
ENDS = pytest.mark.parametrize("ends", [(77, VOCAB), (64, 195, VOCAB)], ids=["two", "three"])


def log_sum_exp_and_label_logit(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What ``shard_log_sum_exps`` computes of the first columns, in plain PyTorch."""
    is_here = (labels >= 0) & (labels < logits.shape[1])
    at_label = logits.gather(1, labels.where(is_here, 0)[:, None]).squeeze(1)
    return logits.logsumexp(1), at_label.where(is_here, 0.0)


def over_shards(logits: Tensor, labels: Tensor, ends: tuple[int, ...], *, gradient: bool) -> list[Tensor]:
    """Each shard's losses; the gradient is written over its columns of ``logits``."""
    vocab = logits.shape[1]
    firsts = (0, *ends[:-1])
    shards = [logits[:, first:end] for first, end in zip(firsts, ends, strict=True)]
    pairs = list(zip(shards, firsts, strict=True))
    parts = torch.stack([shard_log_sum_exps(shard, labels, first=first) for shard, first in pairs])
    return [
        sharded_cross_entropy_(shard, labels, parts, first=first, vocab=vocab, ignore_index=IGNORE, gradient=gradient)
        for shard, first in pairs
    ]


@ENDS
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.bfloat16, 30.0), (torch.float32, 5.0)])
def test_shards_equal_the_reference_of_the_whole(monkeypatch, device, ends, dtype: torch.dtype, scale: float) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)
    ours, labels = inputs(device, dtype, vocab=VOCAB, scale=scale)
    labels[5:8] = torch.tensor([ends[0] - 1, ends[0], ends[-2]])  # on both sides of a cut
    reference, before = ours.clone(), ours.clone()
    losses = over_shards(ours, labels, ends, gradient=False)
    assert torch.equal(ours, before) and all(torch.equal(rank_losses, losses[0]) for rank_losses in losses)
    assert all(torch.equal(rank_losses, losses[0]) for rank_losses in over_shards(ours, labels, ends, gradient=True))
    expected = cross_entropy_reference_(reference, labels, ignore_index=IGNORE, gradient=True)
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=1e-5)
    # an exponential that differs in its last bit may round to the next bfloat16
    torch.testing.assert_close(ours, reference, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert losses[0][2] == 0 and not ours[2].any()


@ENDS
def test_loss_and_gradient_are_those_of_autograd_in_float64(device, ends) -> None:
    logits, labels = inputs(device, torch.float32, vocab=VOCAB, scale=3.0)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORE)
    expected.sum().backward()
    for part, label in zip(
        shard_log_sum_exps(logits[:, :77], labels, first=0),
        log_sum_exp_and_label_logit(wide.detach()[:, :77], labels),
        strict=True,
    ):
        torch.testing.assert_close(part.double(), label, rtol=1e-6, atol=1e-6)
    losses = over_shards(logits, labels, ends, gradient=True)
    torch.testing.assert_close(losses[0].double(), expected.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(logits.double(), wide.grad, rtol=1e-5, atol=3e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_bad_labels_and_logits_show_on_every_shard(device) -> None:
    logits, labels = inputs(device, torch.float32, vocab=VOCAB, scale=1.0)
    labels[5], labels[6] = -1, VOCAB
    logits[7, 40], logits[8, 40] = float("nan"), float("inf")
    for losses in over_shards(logits, labels, (77, VOCAB), gradient=False):
        assert losses[5:7].isnan().all() and losses.isfinite().tolist() == [True] * 5 + [False] * 4


def head(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [3, 7, 16], weight [54, 16] and labels with ignored ones at both ends."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, 16, generator=generator).to(dtype) for shape in ((3, 7), (54,)))
    labels = torch.randint(54, (3, 7), generator=generator)
    labels[0, :4] = labels[2, -2:] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def on_ranks(rank: int, dtype: torch.dtype, chunk_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, this rank's summand of the hidden states' gradient, the gradient of the weight."""
    hidden, weight, labels = head(dtype)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    shards = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    loss_fn = CrossEntropy(chunk_tokens, IGNORE, fused=True)
    loss = loss_fn(hidden, shards, labels)
    (loss * 0.37).backward()
    with torch.no_grad():
        assert torch.equal(loss_fn(hidden, shards, labels), loss)
        if dtype == torch.bfloat16:  # once is enough
            compiled = torch.compile(lambda *a: loss_fn(*a) / 3, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(hidden, shards, labels), loss / 3)
    return loss.detach(), hidden.grad, shards.grad.full_tensor()


@pytest.mark.skipif(bool(machine.gpus()), reason="ranks have no GPU, and kernels no interpreter")
@pytest.mark.parametrize(("ranks", "dtype", "chunk_tokens"), [(2, torch.float32, 4), (3, torch.bfloat16, 7)], ids=str)
def test_loss_and_gradients_on_ranks_against_float64(ranks: int, dtype: torch.dtype, chunk_tokens: int) -> None:
    """Chunks that do and do not divide 21 tokens, so that several are under way."""
    pytest.importorskip("triton", reason="triton cannot be imported")
    wide = [tensor.detach().double().requires_grad_() for tensor in head(dtype)[:2]]
    labels = head(dtype)[2]
    expected = F.cross_entropy((wide[0] @ wide[1].t()).flatten(0, 1), labels.flatten(), reduction="sum")
    (expected * 0.37).backward()
    losses, hidden_grads, weight_grads = zip(*run_ranks(on_ranks, ranks, dtype, chunk_tokens), strict=True)
    assert losses[0].dtype == torch.float32 and all(torch.equal(loss, losses[0]) for loss in losses)
    loss_bound, grad_bound = (1e-6, 1e-5) if dtype == torch.float32 else (1e-3, 1.5e-2)
    assert losses[0].item() == pytest.approx(expected.item(), rel=loss_bound)
    for ours, reference in ((sum(g.double() for g in hidden_grads), wide[0].grad), (weight_grads[0], wide[1].grad)):
        assert (ours - reference).norm() < grad_bound * reference.norm()
