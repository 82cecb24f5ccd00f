from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from titanyaml.distributed import context_parallel
from titanyaml.distributed.tensor import TensorGroup

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_positions_are_dealt_out_once_and_evenly(size: int) -> None:
    length = 24
    for choose in (context_parallel.even_positions, context_parallel.head_tail_positions):
        shards = [choose(length, rank=rank, size=size, device=CPU) for rank in range(size)]
        assert {len(shard) for shard in shards} == {length // size}
        assert torch.cat(shards).sort().values.tolist() == list(range(length))
        assert all((shard.diff() > 0).all() for shard in shards), "causal within a rank"
    # the same number of pairs (query, earlier key) on each rank
    assert len({int((shard + 1).sum()) for shard in shards}) == 1
    whole = torch.arange(length)
    assert torch.equal(context_parallel.rank_order(whole, 0, size), torch.cat(shards))
    assert torch.equal(context_parallel.natural_order(torch.cat(shards), 0, size), whole)


def exchange(rank: int, whole: Tensor, grads: list[Tensor]) -> list[Tensor]:
    group = TensorGroup.of(init_device_mesh("cpu", (2,)))
    mine = whole.chunk(2, dim=2)[rank].clone().requires_grad_()
    heads, more = context_parallel.sequence_to_heads((mine, 2 * mine), group)
    assert torch.equal(more, 2 * heads)
    heads.backward(grads[rank])
    back = context_parallel.heads_to_sequence(heads.detach(), group)
    gathered_from = whole[:, :, context_parallel.head_tail_positions(8, rank=rank, size=2, device=CPU)].requires_grad_()
    gathered = context_parallel.gather_positions(gathered_from, group)
    gathered.backward(whole * (rank + 1))
    return [heads.detach(), mine.grad, back, gathered.detach(), gathered_from.grad]


def test_sequence_for_heads_and_back() -> None:
    whole = torch.randn(2, 6, 8, 4, dtype=torch.float64)
    grads = [torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(2)]
    for rank, (heads, grad, back, gathered, gathered_grad) in enumerate(run_ranks(exchange, 2, whole, grads)):
        assert torch.equal(heads, whole.chunk(2, dim=1)[rank])
        assert torch.equal(grad, torch.cat(grads, dim=1).chunk(2, dim=2)[rank])
        assert torch.equal(back, whole.chunk(2, dim=2)[rank])
        assert torch.equal(gathered, whole)
        mine = context_parallel.head_tail_positions(8, rank=rank, size=2, device=CPU)
        assert torch.equal(gathered_grad, 3 * whole[:, :, mine]), "summands of both ranks"
