from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from titanyaml.distributed.norm import clip_factor, grad_norm
from titanyaml.distributed.rng import generator

INF = float("inf")
SHAPES = [(6, 4), (3, 5), (2,), (8, 8), (7,), ()]


def full_grads(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(s, generator=generator(0, i), dtype=torch.float64).to(dtype) for i, s in enumerate(SHAPES)]


def one_process_norm(dtype: torch.dtype, norm_type: float) -> float:
    flat = torch.cat([grad.double().reshape(-1) for grad in full_grads(dtype)])
    return torch.linalg.vector_norm(flat, norm_type).item()


def spread(grads: list[Tensor], mesh: DeviceMesh, *, partial_scale: float = 1.0) -> list[Tensor]:
    """The gradients in every way that a mesh of (2, 2) can hold them: among them an empty shard and a plain tensor."""
    inner = mesh["shard"]
    rows = [
        distribute_tensor(grads[0], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(grads[1], mesh, [Replicate(), Shard(0)]),
        distribute_tensor(grads[2], mesh, [Shard(0), Shard(0)]),
        DTensor.from_local(grads[3] * partial_scale, inner, [Partial()], run_check=False),
        distribute_tensor(grads[4], inner, [Replicate()]),
        grads[5],
    ]
    assert any(row.to_local().numel() == 0 for row in rows[:5]) == (mesh.get_rank() % 2 == 1)
    return rows


def norms(rank: int, dtype: torch.dtype) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grads = spread(full_grads(dtype), mesh, partial_scale=0.5)
    computed = [grad_norm(grads, norm_type=norm_type) for norm_type in (2.0, INF)]
    grads[0].to_local().fill_(math.nan if rank == 3 else 1.0)
    return computed + [grad_norm(grads, norm_type=norm_type) for norm_type in (2.0, INF)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 3e-7), (torch.bfloat16, 3e-7)]
)
def test_every_mixture_of_shards_has_the_norm_of_one_process(dtype: torch.dtype, tolerance: float) -> None:
    ranks = run_ranks(norms, 4, dtype)
    for norm_type, computed in zip((2.0, INF), zip(*ranks, strict=True), strict=False):
        expected = one_process_norm(dtype, norm_type)
        assert len({value.item() for value in computed}) == 1, "not the same on every rank"
        assert computed[0].item() == pytest.approx(expected, rel=tolerance)
        assert computed[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for two, largest in (rank[2:] for rank in ranks):
        assert not two.isfinite() and not largest.isfinite(), "a NaN of one rank must be seen by all"


def clipped(rank: int, max_norm: float) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grads = spread(full_grads(torch.float64), mesh, partial_scale=0.5)
    factor = clip_factor(grad_norm(grads), max_norm)
    return [(grad.full_tensor() if isinstance(grad, DTensor) else grad) * factor for grad in grads]


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_clipping_is_that_of_torch(max_norm: float) -> None:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in full_grads(torch.float64)]
    for parameter, grad in zip(parameters, full_grads(torch.float64), strict=True):
        parameter.grad = grad
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for computed in run_ranks(clipped, 4, max_norm):
        for grad, parameter in zip(computed, parameters, strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-14, atol=0)


def test_parameters_stand_for_their_gradients_and_tied_ones_count_once() -> None:
    tied, peer, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    tied.grad, peer.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert grad_norm([tied, peer, tied, unused]).item() == 5.0
    assert grad_norm([tied.grad, peer.grad]).item() == 5.0
    assert grad_norm([tied, peer], grads={tied: torch.full((4,), 6.0)}).item() == 12.0


def test_no_gradient_has_norm_zero_and_clipping_leaves_it() -> None:
    assert grad_norm([]).item() == 0.0 == grad_norm([torch.zeros(3)]).item()
    assert clip_factor(grad_norm([]), 1.0).item() == 1.0


def test_long_float32_sums_stay_accurate_on_a_cpu() -> None:
    grad = torch.randn(4_000_000, generator=generator(0, "long"))
    exact = torch.linalg.vector_norm(grad, dtype=torch.float64).item()
    assert grad_norm([grad]).item() == pytest.approx(exact, rel=5e-7)
    assert grad.norm().item() != pytest.approx(exact, rel=5e-6), "torch sums accurately now: _CPU_CHUNK can go"
