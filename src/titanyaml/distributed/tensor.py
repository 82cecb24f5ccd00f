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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanyaml.distributed import compat

_Map = Callable[[Tensor], Tensor]


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
    gather = partial(gather_shards, name=group.name, size=group.size)
    scatter = partial(reduce_scatter_shards, name=group.name, size=group.size)
    return LinearMap.apply(x_BSD, gather, scatter)


def scatter_sum(x_BSD: Tensor, group: TensorGroup) -> Tensor:
    """Summands [B, S, D] to shards [B, S/size, D] of their sum."""
    gather = partial(gather_shards, name=group.name, size=group.size)
    scatter = partial(reduce_scatter_shards, name=group.name, size=group.size)
    return LinearMap.apply(x_BSD, scatter, gather)


def all_reduce_sum(x: Tensor, group: TensorGroup) -> Tensor:
    """Summands to equal sums. The gradients of the sum are equal too, and are each summand's."""
    return LinearMap.apply(x, partial(_all_reduce, name=group.name, dtype=x.dtype), _identity)


def all_reduce_gradient(x: Tensor, group: TensorGroup, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x``, equal on all ranks but used differently: its gradients are summands, and are summed, in ``dtype``."""
    return LinearMap.apply(x, _view, partial(_all_reduce, name=group.name, dtype=dtype or x.dtype))


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: TensorGroup) -> Tensor:
    """All-to-all of rows, those for rank 0 first: ``sent[r]`` to and ``received[r]`` from rank r; gradients go back."""
    send = partial(compat.all_to_all, received=received, sent=sent, group_name=group.name)
    send_back = partial(compat.all_to_all, received=sent, sent=received, group_name=group.name)
    return LinearMap.apply(x, send, send_back)


def local_rows(ids: Tensor, *, rows: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices into this rank's ``rows`` rows of a table of ``rows * size``, 0 for others; a mask, True for its rows."""
    # An id that no rank owns gets row ``rows`` on all of them, which does not exist. The lookup then fails (on CUDA by
    # its device-side assertion), instead of taking the sum of nothing for an embedding.
    row_numbers = ids - rank * rows
    is_local = (row_numbers >= 0) & (row_numbers < rows)
    is_invalid = (ids < 0) | (ids >= rows * size)
    return row_numbers.where(is_local, 0).masked_fill(is_invalid, rows), is_local


class LinearMap(torch.autograd.Function):
    """A linear map of one tensor, and its adjoint, which maps gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear_map: _Map, adjoint: _Map) -> Tensor:
        ctx.adjoint = adjoint
        return linear_map(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(grad), None, None


def _identity(x: Tensor) -> Tensor:
    return x


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return compat.all_reduce(x.to(dtype), "sum", name).to(x.dtype)


def gather_shards(x_BSD: Tensor, name: str, size: int) -> Tensor:
    """As ``gather_sequence``, of any dtype and without a gradient."""
    # the collective works along dimension 0, the sequence is dimension 1
    return torch.cat(compat.all_gather(x_BSD.contiguous(), size, name).chunk(size, dim=0), dim=1)


def reduce_scatter_shards(x_BSD: Tensor, name: str, size: int) -> Tensor:
    """As ``scatter_sum``, without a gradient."""
    return compat.reduce_scatter(torch.cat(x_BSD.chunk(size, dim=1), dim=0), size, name)
