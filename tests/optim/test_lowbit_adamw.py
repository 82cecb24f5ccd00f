"""Moments in 16 and 8 bits: their codes, and AdamW with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import run_ranks
from titanyaml.config.schema import Optim
from titanyaml.distributed.rng import generator
from titanyaml.optim import AdamW, build, moment_codes
from titanyaml.optim.lowbit_adamw import BLOCK, LowBitAdamW, block_size

KINDS = ("adamw_bf16", "adamw_8bit")
SHAPES = {"wide": (6, 512), "odd": (10, 96), "ragged": (4, 30), "experts": (2, 3, 128), "norm": (256,)}


def bits(like: Tensor, step: int) -> Tensor:
    return moment_codes.random_bits(like, torch.tensor(step * 0x9E3779B1 % 2**32))


def sample() -> Tensor:
    """Numbers that span many octaves within a block, and a block of zeros."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(32, BLOCK, generator=draw) * torch.exp(2 * torch.randn(32, BLOCK, generator=draw))
    x[0] = 0
    return x


def roundings(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Mean of 300 roundings of each number, and the largest relative error of one."""
    results = []
    for step in range(300):
        if kind == "bfloat16":
            results.append(moment_codes.to_bfloat16(x, bits(x, step) & 0xFFFF).float())
        elif kind == "signed":
            results.append(moment_codes.decode_signed(*moment_codes.encode_signed(x, bits(x, step) & 0xFFFFF)))
        else:
            results.append(moment_codes.decode_positive(*moment_codes.encode_positive(x, bits(x, step) >> 20)))
    every = torch.stack(results)
    return every.mean(0), ((every - x) / x).abs().amax(0)


@pytest.mark.parametrize(("kind", "step"), [("bfloat16", 2**-7), ("signed", 2**-3), ("positive", 2 ** (32 / 254) - 1)])
def test_rounding_is_right_on_average_and_never_off_by_more_than_a_step(kind: str, step: float) -> None:
    x = sample().square() if kind == "positive" else sample()
    reach = {"bfloat16": 0.0, "signed": 2**-14, "positive": 2**-31}[kind]
    kept = x.abs() > x.abs().amax(-1, keepdim=True) * reach
    mean, worst = roundings(x, kind)
    assert kept[1:].float().mean() > 0.95
    assert (mean[0] == 0).all(), "zeros stay zeros"
    assert worst[kept].max() <= step * 1.001
    error = (mean[kept] - x[kept]) / x[kept]
    # 300 roundings: a standard deviation of at most step / 2 / sqrt(300) each, of 4000 numbers together 1/63 of it
    assert error.abs().max() < 5 * step / 2 / 300**0.5
    assert error.mean().abs() < 4 * step / 2 / 300**0.5 / kept.sum() ** 0.5


def test_what_is_too_small_for_a_code_is_coded_too_large_never_zero() -> None:
    x = torch.tensor([[1e-20, 1.0, 0.0, 1e-3]])
    found = moment_codes.decode_positive(*moment_codes.encode_positive(x, bits(x, 0) >> 20))
    assert found[0, 0] == pytest.approx(2**-32, rel=1e-3) and found[0, 2] == 0 and found[0, 1] == pytest.approx(1)


def test_random_bits_are_even_and_unlike_their_neighbours() -> None:
    found = torch.stack([bits(torch.empty(1 << 15), step) for step in range(2)])
    each = torch.stack([(found >> place) & 1 for place in range(32)]).double()
    assert (each.mean((1, 2)) - 0.5).abs().max() < 0.01
    assert (torch.corrcoef(each.reshape(32, -1)) - torch.eye(32)).abs().max() < 0.03
    assert torch.corrcoef(found.double())[0, 1].abs() < 0.03


def weights(seed: int = 0) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape, generator=generator(seed, name))) for name, shape in SHAPES.items()}


def optimizer(kind: str, params: dict[str, nn.Parameter], **changes: Any) -> AdamW:
    return build(replace(Optim(name=kind), **changes), params, masters={}, device="cpu")


def give_gradients(params: dict[str, Any], step: int) -> None:
    """Gradients of fixed size per number: noise around a fixed direction."""
    for name, parameter in params.items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        scale = torch.rand(SHAPES[name], generator=generator(3, name)) + 0.1
        whole = scale * (torch.randn(SHAPES[name], generator=generator(4, name, step)) + 0.5)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        else:
            parameter.grad = whole.to(local.dtype)


def updates(opt: AdamW, params: dict[str, Any], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        opt.step(1e-2)
        opt.zero_grad()


@pytest.mark.parametrize(("kind", "largest"), [("adamw_bf16", 0.01), ("adamw_8bit", 0.06)])
def test_updates_follow_float32_moments(kind: str, largest: float) -> None:
    """The first update uses moments that were never rounded: it is float32's. Later the way differs by a little."""
    ours, theirs, start = weights(), weights(), weights()
    mine, reference = optimizer(kind, ours), optimizer("adamw", theirs)
    for opt, params in ((mine, ours), (reference, theirs)):
        updates(opt, params, range(1))
    for name in SHAPES:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7), name
    for opt, params in ((mine, ours), (reference, theirs)):
        updates(opt, params, range(1, 50))
    for name in SHAPES:
        way = theirs[name] - start[name]
        error = ((ours[name] - theirs[name]).norm() / way.norm()).item()
        narrow = mine.state_tensors()[name]["exp_avg"].dtype != torch.float32
        assert (0 < error < largest) if narrow else error < 1e-6, name


def test_bytes_of_the_moments() -> None:
    """Rows without a block of 16, and vectors, keep float32."""
    found = {}
    for kind in ("adamw", *KINDS):
        params = weights()
        state = optimizer(kind, params).state_tensors()
        found[kind] = {
            name: sum(t.nbytes for part, t in state[name].items() if part != "step") / params[name].numel()
            for name in SHAPES
        }
    assert set(found["adamw"].values()) == {8.0}
    assert found["adamw_bf16"] == {"wide": 4, "odd": 4, "ragged": 4, "experts": 4, "norm": 8}
    assert found["adamw_8bit"] == {
        "wide": 2 + 12 / 128,
        "odd": 2 + 12 / 32,
        "ragged": 8,
        "experts": 2 + 12 / 128,
        "norm": 8,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_state_goes_on_to_the_bit(kind: str) -> None:
    through, stopped = weights(), weights()
    whole, first = optimizer(kind, through), optimizer(kind, stopped)
    updates(whole, through, range(6))
    updates(first, stopped, range(3))
    again = {name: nn.Parameter(p.detach().clone()) for name, p in stopped.items()}
    second = optimizer(kind, again)
    for name, parts in first.state_tensors().items():
        for part, tensor in parts.items():
            second.state_tensors()[name][part].copy_(tensor)
    updates(second, again, range(3, 6))
    assert all(torch.equal(again[name], through[name]) for name in SHAPES)


def on_mesh(rank: int, kind: str, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    params = {}
    for name, parameter in weights().items():
        shard = distribute_tensor(parameter.detach(), mesh, [Shard(dim if parameter.ndim > 1 else 0)])
        params[name] = nn.Parameter(shard)
    opt = optimizer(kind, params)
    updates(opt, params, range(1))
    state = {
        n: {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in parts.items()}
        for n, parts in opt.state_tensors().items()
    }
    return {"weights": {n: p.detach().full_tensor() for n, p in params.items()}, "state": state}


@pytest.mark.parametrize("dim", [0, -1])
def test_shards_hold_their_part_of_one_state(dim: int) -> None:
    """Blocks lie within the rows of a shard: codes and factors are those of one process but for the random bits."""
    alone = weights()
    opt = optimizer("adamw_8bit", alone)
    updates(opt, alone, range(1))
    for rank in run_ranks(on_mesh, 2, "adamw_8bit", dim % 2):
        for name, parts in opt.state_tensors().items():
            assert torch.equal(rank["weights"][name], alone[name]), name
            same = dim == 0 or name != "odd"  # 96 / 2 = 48 is cut into blocks of 16, 96 into those of 32
            assert [p.shape for p in rank["state"][name].values()] == [p.shape for p in parts.values()] or not same
            for part, tensor in parts.items():
                if same and tensor.dtype == torch.float32:
                    assert torch.equal(rank["state"][name][part], tensor), (name, part)


def test_blocks_of_shards() -> None:
    assert [block_size(torch.empty(shape)) for shape in ((2, 4096), (2, 384), (2, 96), (2, 30))] == [128, 128, 32, 2]


def test_one_compiled_graph_does_what_eager_does() -> None:
    """The graph of a GPU, here by a backend that runs what was traced."""
    eager, traced = weights(), weights()
    mine, other = optimizer("adamw_8bit", eager), optimizer("adamw_8bit", traced)
    assert isinstance(other, LowBitAdamW)
    other.update_rule = torch.compile(other.update_rule, fullgraph=True, dynamic=True, backend="aot_eager")
    for opt, params in ((mine, eager), (other, traced)):
        updates(opt, params, range(3))
    assert all(torch.allclose(eager[name], traced[name], rtol=1e-6, atol=1e-7) for name in SHAPES)
