from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from titanyaml.config.schema import Optim, ParamGroup
from titanyaml.distributed.norm import clip_factor, grad_norm
from titanyaml.distributed.rng import generator
from titanyaml.errors import TitanError
from titanyaml.kernels.master_weights import split_master
from titanyaml.optim import AdamW, build

LRS = [1e-2, 3e-2, 0.0, 2e-2, 1e-2]
SPEC = Optim(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
IMPLEMENTATIONS = ["fused", "foreach", "loop"]


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator(0, name)))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x)).tanh()).square().sum()


def batch(step: int, rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 8, generator=generator(1, step)).to(dtype)


def optimizer_of(model: nn.Module, spec: Optim = SPEC, masters: dict[str, Tensor] | None = None) -> AdamW:
    return build(spec, dict(model.named_parameters()), masters=masters or {}, device="cpu")


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    """Masters that are not equal to the stored weights, as after an initialisation in float32."""
    return {
        name: p.detach().float() * (1 + 1e-3 * torch.rand(p.shape, generator=generator(2, name)))
        for name, p in model.named_parameters()
    }


def split_masters_of(model: nn.Module) -> dict[str, Tensor]:
    """The same, split."""
    masters = masters_of(model)
    return {name: split_master(masters[name], p) for name, p in model.named_parameters()}


def reference_of(model: nn.Module, implementation: str) -> torch.optim.AdamW:
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False}}
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, **flags[implementation])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_are_bit_equal_to_torch(implementation: str, dtype: torch.dtype) -> None:
    ours, theirs = Toy(dtype), Toy(dtype)
    optimizer = optimizer_of(ours, replace(SPEC, implementation=implementation))
    reference = reference_of(theirs, implementation)
    for step, lr in enumerate(LRS):
        for model in (ours, theirs):
            model(batch(step, dtype=dtype)).backward()
        optimizer.step(lr)
        optimizer.zero_grad()
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reference.zero_grad()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
        state = optimizer.state_tensors()[name]
        assert torch.equal(state["exp_avg_sq"], reference.state[other]["exp_avg_sq"])
        assert state["step"].item() == len(LRS)


def test_lr_scale_of_a_group() -> None:
    """With beta1 = beta2 = 0 and no decay an update is lr * sign(gradient)."""
    model = Toy()
    spec = Optim(beta1=0.0, beta2=0.0, weight_decay=0.0, groups=[ParamGroup("head", lr_scale=0.25)])
    optimizer, before = optimizer_of(model, spec), copy.deepcopy(model)
    model(batch(0)).backward()
    optimizer.step(1e-2)
    assert (model.head.weight - before.head.weight).abs().max().item() == pytest.approx(2.5e-3, rel=1e-3)
    assert (model.inner.weight - before.inner.weight).abs().max().item() == pytest.approx(1e-2, rel=1e-3)


def test_masters_take_the_update_in_float32_and_are_rounded_into_the_model() -> None:
    model = Toy(torch.bfloat16)
    masters = masters_of(model)
    reference_model = Toy()
    with torch.no_grad():
        for name, parameter in reference_model.named_parameters():
            parameter.copy_(masters[name])
    optimizer, reference = optimizer_of(model, masters=masters), reference_of(reference_model, "foreach")
    optimizer.load(optimizer.weights())
    for step, lr in enumerate(LRS):
        sums = [torch.zeros_like(p) for p in reference_model.parameters()]
        for micro in range(3):
            model(batch(10 * step + micro, dtype=torch.bfloat16)).backward()
            assert all(p.grad is None for p in model.parameters()), "the bfloat16 gradient is not freed"
        twin = copy.deepcopy(model)
        for micro in range(3):
            loss = twin(batch(10 * step + micro, dtype=torch.bfloat16))
            grads = torch.autograd.grad(loss, list(twin.parameters()))
            for total, grad in zip(sums, grads, strict=True):
                total += grad.float()
        for ours, parameter, total in zip(optimizer.grads(), reference_model.parameters(), sums, strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours, total)
            parameter.grad = total
        optimizer.step(lr)
        optimizer.zero_grad()
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for name, parameter in reference_model.named_parameters():
        assert torch.equal(optimizer.master(name), parameter), name
        assert torch.equal(model.get_parameter(name), parameter.bfloat16()), name
        assert optimizer.master(name).data_ptr() == masters[name].data_ptr()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("adamw", "fused"), ("adamw", "foreach"), ("adamw", "loop"), ("adamw_bf16", "auto"), ("adamw_8bit", "auto")],
)
def test_a_split_master_is_the_float32_one(name: str, implementation: str) -> None:
    """Bit for bit, through updates with equal gradients; the stored weight is its neighbour on ties alone."""
    models = Toy(torch.bfloat16), Toy(torch.bfloat16)
    spec = replace(SPEC, name=name, implementation=implementation)
    split, whole = (optimizer_of(m, spec, of(m)) for m, of in zip(models, (split_masters_of, masters_of), strict=True))
    assert split.describe() == f"{whole.describe()}, split masters"
    for step, lr in enumerate(LRS):
        for model in models:
            for key, parameter in model.named_parameters():
                torch.autograd.backward(parameter, torch.randn(parameter.shape, generator=generator(5, key, step)))
        for optimizer in (split, whole):
            optimizer.step(lr)
            optimizer.zero_grad()
    for key, master in whole.weights().items():
        joined = split.master(key)
        assert joined.dtype == torch.float32 and torch.equal(joined, master), key
        ties = master.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(models[0].get_parameter(key)[~ties], master.bfloat16()[~ties])
        for moment, tensor in whole.state_tensors()[key].items():
            assert torch.equal(split.state_tensors()[key][moment], tensor), (key, moment)


def test_sixteen_microbatches_are_one_batch() -> None:
    """Sums in float32 stay within 16 roundings of the exact sum of the microbatches' gradients; bfloat16 does not."""
    model, rows = Toy(torch.bfloat16), [batch(i, dtype=torch.bfloat16) for i in range(16)]
    names = list(dict(model.named_parameters()))
    exact, rough = {}, {}
    twin = copy.deepcopy(model)
    for x in rows:
        for name, grad in zip(names, torch.autograd.grad(twin(x), list(twin.parameters())), strict=True):
            exact[name] = exact.get(name, 0) + grad.double()
            rough[name] = rough.get(name, 0) + grad
    optimizer = optimizer_of(model, masters=masters_of(model))
    for x in rows:
        model(x).backward()
    whole = Toy(torch.bfloat16).double()
    whole(torch.cat(rows).double()).backward()
    for name, grad, one in zip(names, optimizer.grads(), whole.parameters(), strict=True):
        size = exact[name].abs().max()
        assert (grad - exact[name]).abs().max() <= 16 * 2**-23 * size
        assert (rough[name] - exact[name]).abs().max() > 1e-3 * size
        # what is left against one batch in float64 is the rounding inside each bfloat16 backward
        assert (grad - one.grad).abs().max() <= 0.02 * one.grad.abs().max()


@pytest.mark.parametrize("masters", [None, masters_of, split_masters_of], ids=["none", "float32", "split"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_loaded_state_continues_bit_equal(implementation: str, masters: Callable[..., dict] | None) -> None:
    spec = replace(SPEC, implementation=implementation)

    def begin() -> tuple[Toy, AdamW]:
        model = Toy(torch.bfloat16 if masters else torch.float32)
        return model, optimizer_of(model, spec, masters and masters(model))

    def train(model: Toy, optimizer: AdamW, steps: range) -> None:
        for step in steps:
            model(batch(step, dtype=model.head.weight.dtype)).backward()
            optimizer.step(LRS[step])
            optimizer.zero_grad()

    straight, optimizer = begin()
    train(straight, optimizer, range(2))
    saved = copy.deepcopy((optimizer.weights(), optimizer.state_tensors()))
    train(straight, optimizer, range(2, 5))

    resumed, fresh = begin()
    assert set(fresh.state_tensors()) == set(saved[1]) == {name for name, _ in resumed.named_parameters()}
    weights = fresh.weights()
    for name in fresh.names:
        weights[name].copy_(saved[0][name])
        for key, tensor in fresh.state_tensors()[name].items():
            tensor.copy_(saved[1][name][key])
    fresh.load(weights)
    train(resumed, fresh, range(2, 5))
    for name in fresh.names:
        assert torch.equal(fresh.master(name), optimizer.master(name)), name
        assert torch.equal(resumed.get_parameter(name), straight.get_parameter(name)), name
        for key, tensor in fresh.state_tensors()[name].items():
            assert torch.equal(tensor, optimizer.state_tensors()[name][key]), (name, key)


def test_a_tied_parameter_counts_once_under_its_first_name() -> None:
    tied = nn.Parameter(torch.ones(2, 2))
    params = {"embed": tied, "other": nn.Parameter(torch.ones(3)), "head": tied}
    optimizer = build(SPEC, params, masters={}, device="cpu")
    assert optimizer.names == ("embed", "other")
    assert [name for group in optimizer.groups for name in group.names] == ["embed", "other"]
    assert set(optimizer.state_tensors()) == {"embed", "other"}


def test_a_parameter_without_gradient_is_named() -> None:
    model = Toy()
    optimizer = optimizer_of(model)
    model.head(torch.ones(1, 5)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TitanError, match="inner.weight"):
        optimizer.step(1e-2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_narrow_parameter_needs_a_master() -> None:
    with pytest.raises(AssertionError, match="has no master"):
        optimizer_of(Toy(torch.bfloat16))


def test_zero_grad_forgets_sums_and_gradients() -> None:
    for stored in (torch.float32, torch.bfloat16):
        model = Toy(stored)
        optimizer = optimizer_of(model, masters=masters_of(model) if stored == torch.bfloat16 else None)
        model(batch(0, dtype=stored)).backward()
        first = [grad.clone() for grad in optimizer.grads()]
        optimizer.zero_grad()
        model(batch(0, dtype=stored)).backward()
        assert all(torch.equal(a, b) for a, b in zip(first, optimizer.grads(), strict=True))


def train_sharded(rank: int, implementation: str) -> dict[str, Tensor]:
    """FSDP over two ranks (5 and 3 rows do not divide), a plain tensor, an empty shard and a gradient left as a sum."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = Toy()
    fully_shard(model, mesh=mesh)
    extra = {
        "plain": nn.Parameter(torch.ones(3)),
        "single": nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)])),
        "summed": nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])),
    }
    fused = implementation == "kernel"
    spec = SPEC if fused else replace(SPEC, implementation=implementation)
    optimizer = build(spec, dict(model.named_parameters()) | extra, masters={}, device="cpu", fused=fused)
    assert optimizer.implementation == implementation
    for step, lr in enumerate(LRS):
        model(batch(step)[2 * rank : 2 * rank + 2]).backward()
        extra["plain"].grad = torch.arange(3.0)
        extra["single"].grad = distribute_tensor(torch.tensor([[1.0, 2.0]]), mesh, [Shard(0)])
        extra["summed"].grad = DTensor.from_local(torch.full((2, 2), 0.5), mesh, [Partial()], run_check=False)
        grads = optimizer.grads()
        optimizer.step(lr, clip=clip_factor(grad_norm(grads), 1.0))
        optimizer.zero_grad()
    state = {f"{name}.{key}": t for name, s in optimizer.state_tensors().items() for key, t in s.items()}
    weights = {name: optimizer.master(name) for name in optimizer.names}
    full = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in (weights | state).items()}
    return full | {"layout": [type(s["exp_avg"]) for s in optimizer.state_tensors().values()]}


def train_alone() -> dict[str, Tensor]:
    model = Toy()
    extra = {
        "plain": nn.Parameter(torch.ones(3)),
        "single": nn.Parameter(torch.ones(1, 2)),
        "summed": nn.Parameter(torch.ones(2, 2)),
    }
    optimizer = build(SPEC, dict(model.named_parameters()) | extra, masters={}, device="cpu")
    for step, lr in enumerate(LRS):
        (model(batch(step)) / 2).backward()  # FSDP averages
        extra["plain"].grad = torch.arange(3.0)
        extra["single"].grad, extra["summed"].grad = torch.tensor([[1.0, 2.0]]), torch.ones(2, 2)
        grads = optimizer.grads()
        optimizer.step(lr, clip=clip_factor(grad_norm(grads), 1.0))
        optimizer.zero_grad()
    state = {f"{name}.{key}": t for name, s in optimizer.state_tensors().items() for key, t in s.items()}
    return {name: optimizer.master(name) for name in optimizer.names} | state


@pytest.mark.parametrize(
    "implementation",
    [
        *IMPLEMENTATIONS,
        pytest.param("kernel", marks=pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")),
    ],
)
def test_shards_replicas_and_plain_tensors_train_as_in_one_process(implementation: str) -> None:
    expected = train_alone()
    for rank_result in run_ranks(train_sharded, 2, implementation):
        layout = rank_result.pop("layout")
        assert [kind is DTensor for kind in layout] == [True] * 5 + [False, True, True]
        assert set(rank_result) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(rank_result[name], tensor, rtol=2e-5, atol=2e-6, msg=name)


def update_split(rank: int, fused: bool) -> dict[str, Tensor]:
    """Two updates of split masters, cut unevenly over the ranks, replicated and in rows that one rank has alone."""
    mesh = init_device_mesh("cpu", (2,)) if torch.distributed.is_initialized() else None
    place = lambda tensor, at: distribute_tensor(tensor, mesh, [at]) if mesh else tensor  # noqa: E731
    params, masters = {}, {}
    for name, rows, at in (("cut", 5, Shard(0)), ("alike", 3, Replicate()), ("one", 1, Shard(0))):
        value = place(torch.randn((rows, 4), generator=generator(6, name)), at)
        params[name] = nn.Parameter(value.bfloat16())
        masters[name] = split_master(value, params[name])
    optimizer = build(SPEC, params, masters=masters, device="cpu", fused=fused)
    for step in range(2):
        for name, parameter in params.items():
            grad = torch.randn(parameter.shape, generator=generator(7, name, step)).bfloat16()
            torch.autograd.backward(parameter, place(grad, parameter.placements[0]) if mesh else grad)
        optimizer.step(1e-2)
        optimizer.zero_grad()
    weights = optimizer.weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    optimizer.load({name: tensor.mul_(2) for name, tensor in weights.items()})
    doubled = optimizer.weights()
    full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    assert all(torch.equal(full(doubled[name]), 2 * full(tensor)) for name, tensor in before.items())
    return {name: full(tensor) for name, tensor in before.items()}


@pytest.mark.parametrize(
    "fused",
    [False, pytest.param(True, marks=pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported"))],
)
def test_split_masters_of_shards(fused: bool) -> None:
    expected = update_split(0, fused)
    for rank_result in run_ranks(update_split, 2, fused):
        assert all(torch.equal(rank_result[name], tensor) for name, tensor in expected.items())
