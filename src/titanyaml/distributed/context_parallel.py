"""Which positions of a sequence a context-parallel rank holds, and the exchange of sequence for heads (Ulysses).

Shapes: B batch, N heads, S positions of a rank, T = W*S of all, H head size. W ranks.
"""

from functools import partial

import torch
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import LinearMap, TensorGroup, exchange_rows


def even_positions(length: int, *, rank: int, size: int, device: torch.device) -> Tensor:
    """Positions [S] of a rank: one contiguous run, in rank order."""
    share = length // size
    return torch.arange(rank * share, (rank + 1) * share, device=device)


def head_tail_positions(length: int, *, rank: int, size: int, device: torch.device) -> Tensor:
    """Positions [S] of a rank: of 2*size runs, run ``rank`` (head) and the run as far from the end (tail)."""
    # under a causal mask late positions attend to more keys; head and tail together cost the same on every rank
    run = length // (2 * size)
    offsets = torch.arange(run, device=device)
    return torch.cat((offsets + rank * run, offsets + (2 * size - 1 - rank) * run))


def natural_order(gathered: Tensor, dim: int, size: int) -> Tensor:
    """Head-tail shards, concatenated along ``dim`` in rank order, to the order of positions."""
    runs = gathered.chunk(2 * size, dim)
    return torch.cat((*runs[::2], *runs[::-2]), dim)


def rank_order(full: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of ``natural_order``."""
    runs = full.chunk(2 * size, dim)
    return torch.cat([runs[i] for rank in range(size) for i in (rank, 2 * size - 1 - rank)], dim)


def gather_positions(x_BNSH: Tensor, group: TensorGroup) -> Tensor:
    """Head-tail shards to the full [B, N, T, H] in the order of positions. Gradients of the result are summands."""
    gather = partial(_all_gather, name=group.name, size=group.size)
    return LinearMap.apply(x_BNSH, gather, partial(_reduce_scatter, name=group.name, size=group.size))


def sequence_to_heads(tensors_BNSH: tuple[Tensor, ...], group: TensorGroup) -> tuple[Tensor, ...]:
    """From all heads of the rank's positions to some heads of all positions: each [B, N, S, H] to [B, N/W, T, H]."""
    # One all-to-all for all tensors: one of each would pay its latency again. There is one copy before it and, with
    # several sequences, one after it. The results are views in the memory order B, T, heads, H.
    size = group.size
    heads = [x.shape[1] // size for x in tensors_BNSH]
    by_head_group = [x.transpose(1, 2).unflatten(2, (size, -1)).movedim(2, 0) for x in tensors_BNSH]
    sent_WBSnH = torch.cat(by_head_group, dim=3)
    received_WBSnH = exchange_rows(sent_WBSnH, [1] * size, [1] * size, group)
    return received_WBSnH.movedim(0, 1).flatten(1, 2).transpose(1, 2).split(heads, dim=1)


def heads_to_sequence(x_BNTH: Tensor, group: TensorGroup) -> Tensor:
    """The inverse, of one tensor: [B, N/W, T, H] to [B, N, S, H], in the memory order B, S, N, H."""
    size = group.size
    sent_WBSnH = x_BNTH.transpose(1, 2).unflatten(1, (size, -1)).movedim(1, 0)
    received_WBSnH = exchange_rows(sent_WBSnH, [1] * size, [1] * size, group)
    return received_WBSnH.movedim(0, 2).flatten(2, 3).transpose(1, 2)


def _all_gather(x_BNSH: Tensor, name: str, size: int) -> Tensor:
    shards = compat.all_gather(x_BNSH.contiguous(), size, name).chunk(size)
    return natural_order(torch.cat(shards, dim=2), 2, size)


def _reduce_scatter(grad_BNTH: Tensor, name: str, size: int) -> Tensor:
    # every rank's queries add to the gradient of every position: a sum, of which each rank keeps its shard
    shards = rank_order(grad_BNTH, 2, size).chunk(size, dim=2)
    return compat.reduce_scatter(torch.cat(shards), size, name)
