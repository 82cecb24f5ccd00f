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
    full = torch.arange(length)
    assert torch.equal(context_parallel.rank_order(full, 0, size), torch.cat(shards))
    assert torch.equal(context_parallel.natural_order(torch.cat(shards), 0, size), full)


def exchange(rank: int, full: Tensor, grads: list[Tensor]) -> list[Tensor]:
    group = TensorGroup.of(init_device_mesh("cpu", (2,)))
    own = full.chunk(2, dim=2)[rank].clone().requires_grad_()
    heads, more = context_parallel.sequence_to_heads((own, 2 * own), group)
    assert torch.equal(more, 2 * heads)
    heads.backward(grads[rank])
    back = context_parallel.heads_to_sequence(heads.detach(), group)
    gathered_from = full[:, :, context_parallel.head_tail_positions(8, rank=rank, size=2, device=CPU)].requires_grad_()
    gathered = context_parallel.gather_positions(gathered_from, group)
    gathered.backward(full * (rank + 1))
    return [heads.detach(), own.grad, back, gathered.detach(), gathered_from.grad]


def test_sequence_for_heads_and_back() -> None:
    full = torch.randn(2, 6, 8, 4, dtype=torch.float64)
    grads = [torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(2)]
    for rank, (heads, grad, back, gathered, gathered_grad) in enumerate(run_ranks(exchange, 2, full, grads)):
        assert torch.equal(heads, full.chunk(2, dim=1)[rank])
        assert torch.equal(grad, torch.cat(grads, dim=1).chunk(2, dim=2)[rank])
        assert torch.equal(back, full.chunk(2, dim=2)[rank])
        assert torch.equal(gathered, full)
        own = context_parallel.head_tail_positions(8, rank=rank, size=2, device=CPU)
        assert torch.equal(gathered_grad, 3 * full[:, :, own]), "summands of both ranks"
