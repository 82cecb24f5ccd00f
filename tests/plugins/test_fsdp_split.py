"""Split masters under FSDP: what is stored where, and that it trains as float32 masters do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from tests.plugins.parity import TP, Case, on_mesh, one_process, whole
from tests.plugins.small import FSDP, LAYERS, CountOperators, batch, build, context, spec
from tests.ranks import run_ranks
from titanyaml import optim
from titanyaml.config import schema
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.kernels.master_weights import full_precision, split_master
from titanyaml.plugins.fsdp import FullyShard

MIXED = {"param_dtype": torch.float32, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
SPLIT = {**FSDP, "master": "split"}
FSDP2, DDP2 = ParallelDims(dp_shard=2), ParallelDims(dp_replicate=2)
HSDP = ParallelDims(dp_replicate=2, dp_shard=2)
STEPS, LR, ROWS = 3, 0.1, 5  # rows: uneven over two ranks


class Dots(nn.Module):
    """Two layers with one weight each: its gradient is the factor that it is multiplied by."""

    facts = SimpleNamespace(blocks=("layers.0", "layers.1"), layouts=(SimpleNamespace(experts=""),) * 2)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dot() for _ in range(2))

    def forward(self, factor: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](torch.zeros((), requires_grad=True), factor), -factor)


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, 4))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x + (self.weight * factor).sum()


def initial(name: str) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(len(name) + ord(name[7])))


#: Sizes of the gradient's parts by microbatch and rank; 258 in all. What a microbatch's ranks have together is a
#: bfloat16 number; each 1 is lost where it is added to 256 in bfloat16.
OVER_MICROBATCHES, OVER_RANKS = [[256, 0], [0, 1], [1, 0]], [[256, 1, 1, 0]]


def sign(step: int) -> Tensor:
    return torch.randint(0, 2, (ROWS, 4), generator=torch.Generator().manual_seed(step)) * 2.0 - 1


def dots(rank: int, dims: ParallelDims, parts: list[list[int]]) -> dict[str, Tensor]:
    """Masters at the start and after STEPS updates."""
    torch.set_default_device("meta")
    model = Dots()
    torch.set_default_device(None)
    ctx = context(spec(), dims=dims, mesh=dims.build("cpu"), **MIXED)
    ctx = SimpleNamespace(**{**vars(ctx), "facts": model.facts})
    model, _ = FullyShard(master="split").apply(model, ctx)
    model.to_empty(device="cpu")
    named = dict(model.named_parameters())
    masters = {
        name: split_master(distribute_tensor(initial(name), p.device_mesh, p.placements), p)
        for name, p in named.items()
    }
    masters_by_step = {f"{name} 0": whole(full_precision(p.detach(), masters[name])) for name, p in named.items()}
    optimizer = optim.build(schema.Optim(), named, masters=masters, device="cpu", one_backward=len(parts) == 1)
    for step in range(STEPS):
        for sizes in parts:
            model((sign(step) * 2**step * sizes[rank]).bfloat16()).backward()
        optimizer.step(LR)
        optimizer.zero_grad()
    return masters_by_step | {f"{name} {STEPS}": whole(optimizer.master(name)) for name in named}


def by_hand() -> dict[str, Tensor]:
    """AdamW of the exact sums, in float64."""
    masters_by_step, defaults = {}, schema.Optim()
    for name, factor in (("layers.0.weight", 258), ("layers.1.weight", -258)):
        masters_by_step[f"{name} 0"] = initial(name)
        weight, mean, square = initial(name).double(), 0.0, 0.0
        for step in range(STEPS):
            grad = sign(step).double() * 2**step * factor
            mean = defaults.beta1 * mean + (1 - defaults.beta1) * grad
            square = defaults.beta2 * square + (1 - defaults.beta2) * grad**2
            weight = weight * (1 - LR * defaults.weight_decay)
            root = (square / (1 - defaults.beta2 ** (step + 1))).sqrt() + defaults.eps
            weight = weight - LR * mean / (1 - defaults.beta1 ** (step + 1)) / root
        masters_by_step[f"{name} {STEPS}"] = weight
    return masters_by_step


@pytest.mark.parametrize(
    ("dims", "parts"),
    [(FSDP2, OVER_MICROBATCHES), (DDP2, OVER_MICROBATCHES), (HSDP, OVER_RANKS)],
    ids=["fsdp2", "ddp2", "hsdp"],
)
def test_masters_are_those_of_exact_sums(dims: ParallelDims, parts: list[list[int]]) -> None:
    expected = by_hand()
    for actual in run_ranks(dots, dims.world_size, dims, parts):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            close = {"rtol": 0, "atol": 0} if name.endswith(" 0") else {"rtol": 1e-6, "atol": 1e-7}
            torch.testing.assert_close(actual[name].double(), tensor.double(), **close, msg=name)


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The worst relative error of a gradient."""
    assert actual.keys() == expected.keys()
    return max(((actual[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(FSDP2, {"fsdp": SPLIT}, accumulation=2, model={"tie_embeddings": True}),
        Case(ParallelDims(dp_shard=2, tp=2), {"tp": TP, "fsdp": SPLIT}),
    ],
    ids=["fsdp2", "fsdp2_tp2"],
)
def test_trains_as_one_process_with_split_masters(case: Case) -> None:
    expected, exact = one_process(case, split=True, **MIXED), one_process(case)
    for rank in run_ranks(on_mesh, case.dims.world_size, case, {"split": True, **MIXED}):
        assert rank["dtypes"] == {torch.bfloat16} and rank["masters"] == rank["names"]
        assert all(torch.equal(rank["initial"][name], value) for name, value in expected["initial"].items())
        # later ones part: 1e-2 as a rate makes much of roundings
        assert rank["losses"][:3] == pytest.approx(expected["losses"][:3], rel=2e-3)
        # as far from float64 as one process in bfloat16 is, and no farther
        assert distance(rank["grads"][0], exact["grads"][0]) < 1.5 * distance(expected["grads"][0], exact["grads"][0])
        assert (
            ", stored in bfloat16, the optimizer keeps what is missing for the float32 masters, computing in bfloat16; "
            "gradients summed in float32 after every microbatch, then rounded to bfloat16; freed after forward: all "
        ) in rank["changes"]["fsdp"].summary


def casts(rank: int) -> dict[str, int]:
    """Multi-tensor copies outside FSDP's own operators, in one forward."""
    counts = {}
    for master, node in (("float32", FSDP), ("split", SPLIT)):
        built = build({"fsdp": node}, split=master == "split", dims=FSDP2, mesh=FSDP2.build("cpu"), **MIXED)
        with torch.no_grad(), CountOperators() as counted:
            built.model(batch(1)[0])
        assert counted.counts["all_gather_copy_in"] == LAYERS + 1
        counts[master] = counted.counts["_foreach_copy_"]
    return counts


def test_weights_are_gathered_without_a_cast() -> None:
    assert run_ranks(casts, 2) == [{"float32": LAYERS + 1, "split": 0}] * 2
