"""Collectives with gradients over one group of ranks, as tensor and expert parallelism use them.

Activations are plain tensors. Each docstring says what the ranks hold before and after: *equal* tensors, *shards* (each
its slice of the sequence) or *summands* (addends of the true value). The backward of each function does the reverse to
gradients, so a chain of them is exact whatever stands between. DTensor activations would place collectives by
themselves; in torch 2.13 a compiled block after a sharded embedding then gives the embedding a gradient of zero.

Only functional collectives are used: torch.compile and async tensor parallelism see these operators in the graph. Each
function waits for its result: one still on its way loses its gradient where it enters a compiled block (torch 2.13).

Shapes: B batch, S sequence, D model width. A sequence is sliced evenly along dimension 1.
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
    """The ranks of a one-dimensional mesh: name of the process group, this rank's index in it, number of ranks."""

    name: str
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TensorGroup:
        assert mesh.ndim == 1, "one axis"
        return cls(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def local(tensor: Tensor) -> Tensor:
    """The shard on this rank; its gradient goes back to the DTensor, placed alike."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_like(shard: Tensor, template: Tensor) -> Tensor:
    """``shard``, of the shape of ``template``'s shard on this rank, as a tensor that is placed as ``template`` is."""
    if not isinstance(template, DTensor):
        return shard
    mesh, placements, stride = template.device_mesh, template.placements, template.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=template.shape, stride=stride)


def gather_sequence(x_BSD: Tensor, group: TensorGroup) -> Tensor:
    """Shards [B, S/size, D] to equal tensors [B, S, D], whose gradients are summands."""
    return _GatherSequence.apply(x_BSD, group.name, group.size)


def scatter_sum(x_BSD: Tensor, group: TensorGroup) -> Tensor:
    """Summands [B, S, D] to shards [B, S/size, D] of their sum."""
    return _ScatterSum.apply(x_BSD, group.name, group.size)


def all_reduce_sum(x: Tensor, group: TensorGroup) -> Tensor:
    """Summands to equal sums. The gradients of the sum are equal too, and are each summand's."""
    return _AllReduceSum.apply(x, group.name)


def all_reduce_gradient(x: Tensor, group: TensorGroup, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x``, equal on all ranks but used differently: its gradients are summands, and are summed, in ``dtype``."""
    return _AllReduceGradient.apply(x, group.name, dtype or x.dtype)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: TensorGroup) -> Tensor:
    """All-to-all of rows [sum(sent), ...], those for rank 0 first, to [sum(received), ...]; gradients travel back.

    ``sent`` and ``received`` are numbers of rows to and from each rank.
    """
    return _ExchangeRows.apply(x, sent, received, group.name)


def local_rows(ids: Tensor, *, rows: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices into this rank's ``rows`` rows of a table of ``rows * size``, 0 for others; a mask, True for its rows."""
    # An id that no rank owns gets row ``rows`` on all of them, which does not exist. The lookup then fails (on CUDA by
    # its device-side assertion), instead of taking the sum of nothing for an embedding.
    row_numbers = ids - rank * rows
    is_local = (row_numbers >= 0) & (row_numbers < rows)
    is_invalid = (ids < 0) | (ids >= rows * size)
    return row_numbers.where(is_local, 0).masked_fill(is_invalid, rows), is_local


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


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return compat.all_reduce(x, "sum", name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _AllReduceGradient(torch.autograd.Function):
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
        ctx.route = sent, received, name
        return compat.all_to_all(x, received, sent, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, name = ctx.route
        return compat.all_to_all(grad, sent, received, name), None, None, None


def gather_shards(x_BSD: Tensor, name: str, size: int) -> Tensor:
    """As ``gather_sequence``, of any dtype and without a gradient."""
    # the collective works along dimension 0, the sequence is dimension 1
    return torch.cat(compat.all_gather(x_BSD.contiguous(), size, name).chunk(size, dim=0), dim=1)


def reduce_scatter_shards(x_BSD: Tensor, name: str, size: int) -> Tensor:
    """As ``scatter_sum``, without a gradient."""
    return compat.reduce_scatter(torch.cat(x_BSD.chunk(size, dim=1), dim=0), size, name)
