from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.references import adamw_reference_
from titanyaml.config.schema import Optim
from titanyaml.data.loader import Batch
from titanyaml.distributed.env import Env
from titanyaml.distributed.norm import clip_factor, grad_norm
from titanyaml.errors import NonFiniteError
from titanyaml.kernels import adamw
from titanyaml.kernels.adamw import Factors, adamw_
from titanyaml.kernels.master_weights import join, split_master
from titanyaml.optim import AdamW, build
from titanyaml.optim.adamw_backends import TritonAdamW
from titanyaml.runner.train_step import TrainStep

SPEC = Optim(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
LRS = [1e-2, 3e-2, 0.0, 2e-2, 1e-2]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """Several programs, and a last one that is not full."""
    monkeypatch.setattr(adamw, "BLOCK", 64)


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, None], ids=str)
def test_equals_its_reference(device, gradient: torch.dtype, stored: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(7, 45, generator=generator).to(device)  # noqa: E731
    ours = [draw(), torch.zeros(7, 45, device=device), torch.zeros(7, 45, device=device)]  # master and moments
    expected = [t.clone() for t in ours]
    weights = [None if stored is None else torch.empty(7, 45, dtype=stored, device=device) for _ in range(2)]
    for step, lr in enumerate(LRS, 1):
        grad, clip = draw().to(gradient), torch.tensor(0.3, device=device)
        factors = Factors.at(step, lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
        adamw_(weights[0], ours[0], grad, *ours[1:], clip, factors)
        adamw_reference_(weights[1], expected[0], grad, *expected[1:], clip, factors)
        for our_tensor, their_tensor in zip(ours, expected, strict=True):
            torch.testing.assert_close(our_tensor, their_tensor, rtol=1e-5, atol=1e-6)
    if stored is not None:
        assert torch.equal(weights[0], ours[0].to(stored)), "the stored weight is the master, rounded to nearest"


@pytest.mark.parametrize("update", [adamw_, adamw_reference_], ids=["kernel", "reference"])
def test_a_split_master_is_the_float32_one(device, update) -> None:
    """Bit for bit over several updates, a number that overflows to infinity and one that becomes NaN included."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(7, 45, generator=generator).to(device)  # noqa: E731
    float32_master, moments = draw(), [torch.zeros(7, 45, device=device) for _ in range(4)]
    float32_master[0, :4] = torch.tensor([3.4e38, float("nan"), -0.0, 1e-40])
    weight, stored = (torch.empty_like(float32_master, dtype=torch.bfloat16) for _ in range(2))
    remainder = split_master(float32_master, weight)
    for step, lr in enumerate(LRS, 1):
        grad, clip = draw().bfloat16(), torch.tensor(0.3, device=device)
        factors = Factors.at(step, lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
        update(weight, remainder, grad, *moments[:2], clip, factors)
        update(stored, float32_master, grad, *moments[2:], clip, factors)
        joined = join(weight, remainder)
        assert torch.equal(joined.nan_to_num(7.0).view(torch.int32), float32_master.nan_to_num(7.0).view(torch.int32))
        assert all(torch.equal(*pair) for pair in zip(moments[:2], moments[2:], strict=True))
        ties = float32_master.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(weight[~ties].nan_to_num(7.0), stored[~ties].nan_to_num(7.0))
        assert weight[0, 1].isnan() and joined[0, 1].isnan(), "a NaN is hidden"


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(24, 33), nn.LayerNorm(33), nn.Linear(33, 3, bias=False)
        self.to(dtype)

    def forward(self, tokens: Tensor, labels_BS: Tensor | None = None, loss_fn: object = None, **_: object) -> Tensor:
        return self.head(self.norm(self.inner(tokens)).tanh()).square().sum()


def trained(
    device: torch.device, dtype: torch.dtype, *, fused: bool, microbatches: int, split: bool = False
) -> tuple[AdamW, Toy]:
    model = Toy(dtype).to(device)
    masters = {n: p.detach().float() for n, p in model.named_parameters()} if dtype == torch.bfloat16 else {}
    if split:
        masters = {n: split_master(masters[n], p) for n, p in model.named_parameters()}
    optimizer = build(
        SPEC,
        dict(model.named_parameters()),
        masters=masters,
        device=device,
        fused=fused,
        one_backward=microbatches == 1,
    )
    assert isinstance(optimizer, TritonAdamW) is fused
    generator = torch.Generator().manual_seed(1)
    for lr in LRS:
        for _ in range(microbatches):
            model(torch.randn(4, 24, generator=generator).to(device, dtype)).backward()
        grads = optimizer.grads()
        narrow = fused and microbatches == 1
        assert all(grad.dtype == (dtype if narrow else torch.float32) for grad in grads)
        optimizer.step(lr, clip=clip_factor(grad_norm(grads), 1.0))
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return optimizer, model


@pytest.mark.parametrize(
    ("dtype", "microbatches"),
    [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1), (torch.bfloat16, 2)],
    ids=str,
)
def test_trains_as_torch_does(device, dtype: torch.dtype, microbatches: int) -> None:
    """A bfloat16 gradient that is read directly, or summed in float32 first, with the clipping folded in."""
    ours, our_model = trained(device, dtype, fused=True, microbatches=microbatches)
    expected, _ = trained(device, dtype, fused=False, microbatches=microbatches)
    for name in ours.names:
        torch.testing.assert_close(ours.master(name), expected.master(name), rtol=2e-5, atol=2e-6)
        for key, state in ours.state_tensors()[name].items():
            torch.testing.assert_close(state.cpu(), expected.state_tensors()[name][key].cpu(), rtol=1e-4, atol=1e-6)
        assert torch.equal(our_model.get_parameter(name), ours.master(name).to(dtype))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_split_masters_train_alike(device, microbatches: int) -> None:
    """Gradients come from the stored weights: equal as long as no master is a tie."""
    optimizer, _ = trained(device, torch.bfloat16, fused=True, microbatches=microbatches)
    split, _ = trained(device, torch.bfloat16, fused=True, microbatches=microbatches, split=True)
    assert split.describe().startswith("fused, split masters")
    for name, master in optimizer.weights().items():
        assert torch.equal(split.master(name), master.cpu()), name


def test_a_checkpoint_of_one_is_read_by_the_other(device) -> None:
    first, _ = trained(device, torch.float32, fused=True, microbatches=1)
    second, _ = trained(device, torch.float32, fused=False, microbatches=1)
    for name, state in first.state_tensors().items():
        assert state.keys() == second.state_tensors()[name].keys()
        for key, tensor in state.items():
            assert tensor.shape == second.state_tensors()[name][key].shape
            assert tensor.dtype == second.state_tensors()[name][key].dtype
        assert state["step"].item() == len(LRS)


def test_a_norm_that_is_not_finite_makes_no_update(device) -> None:
    optimizer, model = trained(device, torch.bfloat16, fused=True, microbatches=1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_tensors(), optimizer.master("inner.weight")))
    env = Env(rank=0, world_size=1, local_rank=0, device=device, backend="gloo")

    class Poisoned(nn.Module):
        def forward(self, **_: object) -> Tensor:
            return model(torch.full((4, 24), float("inf"), device=device, dtype=torch.bfloat16))

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens, tokens[:, 0])
    step = TrainStep(Poisoned(), optimizer, loss_fn=None, max_norm=1.0, documents=False, env=env)
    with pytest.raises(NonFiniteError):
        step([batch], tokens=4, lr=1e-2)
    after = (model.state_dict(), optimizer.state_tensors(), optimizer.master("inner.weight"))
    for old, new in zip(*map(torch.utils._pytree.tree_leaves, (before, after)), strict=True):
        assert torch.equal(old, new)


def test_what_the_kernel_cannot_update_is_left_to_torch() -> None:
    wide = {"w": nn.Parameter(torch.ones(4, 4, dtype=torch.float64))}
    turned = {"w": nn.Parameter(torch.ones(4, 8).t())}
    for params in (wide, turned):
        assert type(build(SPEC, params, masters={}, device="cpu", fused=True)) is AdamW
    chosen = Optim(implementation="loop")
    assert type(build(chosen, {"w": nn.Parameter(torch.ones(4))}, masters={}, device="cpu", fused=True)) is AdamW
