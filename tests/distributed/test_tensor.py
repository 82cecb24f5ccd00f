from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from titanyaml.distributed import tensor
from titanyaml.distributed.tensor import TensorGroup, all_reduce_gradient, local_rows

RANKS = 3


def tensors(seed: int, *shape: int) -> list[Tensor]:
    """One tensor a rank."""
    draw = torch.Generator().manual_seed(seed)
    return list(torch.randn(RANKS, *shape, generator=draw, dtype=torch.float64))


def apply(rank: int, name: str, inputs: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Output and gradient of this rank."""
    group = TensorGroup.of(init_device_mesh("cpu", (RANKS,)))
    assert (group.rank, group.size) == (rank, RANKS)
    x = inputs[rank].requires_grad_()
    out = getattr(tensor, name)(x, group)
    out.backward(grads[rank])
    return out.detach(), x.grad


def run(name: str, inputs: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    outs, results = zip(*run_ranks(apply, RANKS, name, inputs, grads), strict=True)
    return list(outs), list(results)


def same(results: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-14, atol=1e-14) for a, b in zip(results, wanted, strict=True))


def test_gathered_parts_get_the_sum_of_their_gradients() -> None:
    parts, summands = tensors(0, 2, 4, 5), tensors(1, 2, 12, 5)
    outs, grads = run("gather_sequence", parts, summands)
    assert same(outs, [torch.cat(parts, dim=1)] * RANKS)
    assert same(grads, list(sum(summands).chunk(RANKS, dim=1)))


def test_scattered_sums_get_the_whole_gradient() -> None:
    summands, parts = tensors(0, 2, 12, 5), tensors(1, 2, 4, 5)
    outs, grads = run("scatter_sum", summands, parts)
    assert same(outs, list(sum(summands).chunk(RANKS, dim=1)))
    assert same(grads, [torch.cat(parts, dim=1)] * RANKS)


def test_sums_and_their_reverse() -> None:
    summands, equal = tensors(0, 2, 5), tensors(1, 2, 5)[:1] * RANKS
    outs, grads = run("all_reduce_sum", summands, equal)
    assert same(outs, [sum(summands)] * RANKS) and same(grads, equal)
    outs, grads = run("all_reduce_gradient", equal, summands)
    assert same(outs, equal) and same(grads, [sum(summands)] * RANKS)


def wide_sum(rank: int) -> Tensor:
    """1 + 2^-8 + 2^-8: bfloat16 would lose both small summands."""
    group = TensorGroup.of(init_device_mesh("cpu", (RANKS,)))
    x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.tensor([1.0 if rank == 0 else 2**-8], dtype=torch.bfloat16)
    all_reduce_gradient(x, group, dtype=torch.float32).backward(grad)
    return x.grad


def test_gradients_are_summed_in_the_given_dtype() -> None:
    assert [grad.item() for grad in run_ranks(wide_sum, RANKS)] == [1 + 2**-7] * RANKS


def test_rows_of_one_rank_and_of_none() -> None:
    ids = torch.tensor([0, 3, 4, 7, 8, 11, 12, -1])
    rows, is_own = local_rows(ids, rows=4, rank=1, size=3)
    assert rows.tolist() == [0, 0, 0, 3, 0, 0, 4, 4], "an id of no rank gets a row that does not exist"
    assert is_own.tolist() == [False, False, True, True, False, False, False, False]
