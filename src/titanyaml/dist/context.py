"""What a context-parallel rank holds of a sequence, and the exchange of sequence for heads.

Shapes: B batch, N heads, S positions of a rank, T = W*S of all, H head size. W ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanyaml.dist import compat
from titanyaml.dist.tensor import TensorGroup


def even_positions(length: int, *, rank: int, size: int, device: torch.device) -> Tensor:
    """Positions [S] of a rank: one run of neighbours, in the order of ranks."""
    share = length // size
    return torch.arange(rank * share, (rank + 1) * share, device=device)


def head_tail_positions(length: int, *, rank: int, size: int, device: torch.device) -> Tensor:
    """Positions [S] of a rank: of 2*size runs the one numbered ``rank`` and the one as far from the end.

    Under a causal mask late positions have more to look at; together head and tail cost the same on each rank.
    """
    run = length // (2 * size)
    numbers = torch.arange(run, device=device)
    return torch.cat((numbers + rank * run, numbers + (2 * size - 1 - rank) * run))


def natural_order(gathered: Tensor, dim: int, size: int) -> Tensor:
    """Head-tail shards, one after the other in rank order along ``dim``, to the order of positions."""
    runs = gathered.chunk(2 * size, dim)
    return torch.cat((*runs[::2], *runs[::-2]), dim)


def rank_order(whole: Tensor, dim: int, size: int) -> Tensor:
    """The reverse of ``natural_order``."""
    runs = whole.chunk(2 * size, dim)
    return torch.cat([runs[i] for rank in range(size) for i in (rank, 2 * size - 1 - rank)], dim)


def gather_positions(x_BNSH: Tensor, group: TensorGroup) -> Tensor:
    """Head-tail shards to the whole [B, N, T, H] in the order of positions; its gradients are summands."""
    return _GatherPositions.apply(x_BNSH, group.name, group.size)


def sequence_to_heads(x_BNSH: Tensor, group: TensorGroup) -> Tensor:
    """All heads of the rank's positions to some heads of all positions: [B, N, S, H] to [B, N/W, T, H]."""
    return _Exchange.apply(x_BNSH, group.name, group.size, True)


def heads_to_sequence(x_BNTH: Tensor, group: TensorGroup) -> Tensor:
    """The reverse: [B, N/W, T, H] to [B, N, S, H]."""
    return _Exchange.apply(x_BNTH, group.name, group.size, False)


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNSH: Tensor, name: str, size: int) -> Tensor:
        ctx.group = name, size
        ranks = compat.all_gather(x_BNSH.contiguous(), size, name).chunk(size)
        return natural_order(torch.cat(ranks, dim=2), 2, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor | None, ...]:
        name, size = ctx.group
        ranks = rank_order(grad_BNTH, 2, size).chunk(size, dim=2)
        return compat.reduce_scatter(torch.cat(ranks), size, name), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int, to_heads: bool) -> Tensor:
        ctx.group = name, size, to_heads
        return _exchange(x, name, size, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, size, to_heads = ctx.group
        return _exchange(grad, name, size, not to_heads), None, None, None


def _exchange(x: Tensor, name: str, size: int, to_heads: bool) -> Tensor:
    split, joined = (1, 2) if to_heads else (2, 1)
    parts = torch.stack(x.chunk(size, split))  # the collective works along dimension 0
    return torch.cat(compat.all_to_all(parts, [1] * size, [1] * size, name).unbind(), joined)
