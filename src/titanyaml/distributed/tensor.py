"""What tensor and expert parallelism compute with: one group, its autograd-aware collectives, who owns which row.

Activations are plain tensors. Each function says what the tp ranks hold before and after: *equal* (the same tensor),
*part* (each its slice of the sequence) or *summand* (addends of the true value). The backward of each does the
reverse for gradients, so that a chain of them is exact whatever stands between. Functional collectives only: they are
operators that torch.compile and async tensor parallelism see in the graph. Waiting is part of each function; a result
that is still on its way, entering a compiled block, loses its gradient there (torch 2.13).

Shapes: B batch, S sequence, D model width; a sequence is sliced evenly along dimension 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanyaml.distributed import compat


@dataclass(frozen=True)
class TensorGroup:
    """The ranks of a one-dimensional mesh. name: of the process group. rank: this rank's place. size: ranks."""

    name: str
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TensorGroup:
        """The group of ``mesh``."""
        assert mesh.ndim == 1, "one axis"
        return cls(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def local(tensor: Tensor) -> Tensor:
    """The shard on this rank; its gradient goes back to the DTensor, placed alike."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_like(shard: Tensor, other: Tensor) -> Tensor:
    """``shard``, of the shape of ``other``'s shard on this rank, as a tensor that is placed as ``other`` is."""
    if not isinstance(other, DTensor):
        return shard
    mesh, placements, stride = other.device_mesh, other.placements, other.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=other.shape, stride=stride)


def gather_sequence(x_BSD: Tensor, group: TensorGroup) -> Tensor:
    """Parts [B, S/size, D] to equal wholes [B, S, D]. The gradients of the wholes are summands."""
    return _GatherSequence.apply(x_BSD, group.name, group.size)


def scatter_sum(x_BSD: Tensor, group: TensorGroup) -> Tensor:
    """Summands [B, S, D] to parts [B, S/size, D] of their sum."""
    return _ScatterSum.apply(x_BSD, group.name, group.size)


def all_reduce_sum(x: Tensor, group: TensorGroup) -> Tensor:
    """Summands to their sum, equal everywhere; so is its gradient, which is each summand's."""
    return _Sum.apply(x, group.name)


def all_reduce_gradient(x: Tensor, group: TensorGroup, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x``, equal everywhere and used differently: its gradients are summands, and are summed.

    Args:
        dtype: of the sum, which is rounded to x's dtype afterwards; None: x's.
    """
    return _SumGradient.apply(x, group.name, dtype or x.dtype)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: TensorGroup) -> Tensor:
    """Rows to the ranks that need them; the gradients go back.

    Args:
        x: [sum(sent), ...], the rows for rank 0 first. sent, received: rows to and from each rank.

    Returns:
        [sum(received), ...], the rows from rank 0 first.
    """
    return _ExchangeRows.apply(x, sent, received, group.name)


def local_rows(ids: Tensor, *, rows: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Where ids stand in this rank's ``rows`` rows of a table of ``rows * size``.

    Returns:
        Row numbers, 0 for rows of other ranks; and a mask, True where the row is ours. An id that no rank owns gets
        row ``rows`` everywhere, which is no row: the lookup fails (on CUDA by its device-side assertion) instead of
        taking the sum of nothing for an embedding.
    """
    rows_of_ids = ids - rank * rows
    mine = (rows_of_ids >= 0) & (rows_of_ids < rows)
    nobodys = (ids < 0) | (ids >= rows * size)
    return rows_of_ids.where(mine, 0).masked_fill(nobodys, rows), mine


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, name: str, size: int) -> Tensor:
        ctx.group = name, size
        return gather_shards(x_BSD, name, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_shards(grad_BSD, *ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, name: str, size: int) -> Tensor:
        ctx.group = name, size
        return reduce_scatter_shards(x_BSD, name, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
        return gather_shards(grad_BSD, *ctx.group), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return compat.all_reduce(x, "sum", name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        ctx.group = name, dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, dtype = ctx.group
        return compat.all_reduce(grad.to(dtype), "sum", name).to(grad.dtype), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        ctx.way = sent, received, name
        return compat.all_to_all(x, received, sent, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, name = ctx.way
        return compat.all_to_all(grad, sent, received, name), None, None, None


def gather_shards(x_BSD: Tensor, name: str, size: int) -> Tensor:
    """As ``gather_sequence``, of any dtype and without a gradient."""
    # the collective works along dimension 0; the sequence is dimension 1
    return torch.cat(compat.all_gather(x_BSD.contiguous(), size, name).chunk(size, dim=0), dim=1)


def reduce_scatter_shards(x_BSD: Tensor, name: str, size: int) -> Tensor:
    """As ``scatter_sum``, without a gradient."""
    return compat.reduce_scatter(torch.cat(x_BSD.chunk(size, dim=1), dim=0), size, name)
