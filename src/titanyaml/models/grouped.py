"""Matrix products of groups of rows, each group with a matrix of its own: what a mixture's experts compute.

On a GPU in bfloat16 it is torch's grouped product, one kernel. Elsewhere it is a loop over the groups inside one custom
operator: the rows of a group are known at run time only, and a loop over them would break a compiled graph. Shapes
outside the operator do not depend on the data. Shapes: M rows, sorted by group; E groups; I, O features in and out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from titanyaml.distributed import compat

_ALIGNED = 16  # bytes; torch's grouped product takes rows that begin at multiples of it


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Row m of group e times ``weight_EOI[e]`` transposed.

    Args:
        x_MI: rows in the order of their groups. weight_EOI: same dtype.
        counts_E: int64, rows of each group, whose sum is M; may be 0.

    Returns:
        [M, O] in x's dtype. Gradients of empty groups are zeros.
    """
    if fits_kernel(x_MI, weight_EOI):
        return compat.grouped_mm(x_MI, weight_EOI.transpose(1, 2), counts_E.cumsum(0).to(torch.int32))
    return _GroupedLinear.apply(x_MI, weight_EOI, counts_E)


def fits_kernel(x_MI: Tensor, weight_EOI: Tensor) -> bool:
    """Whether torch's grouped product takes these: bfloat16 on a GPU, rows aligned."""
    rows = (x_MI.shape[-1], weight_EOI.shape[-2])
    return x_MI.is_cuda and x_MI.dtype == torch.bfloat16 and all(n * x_MI.itemsize % _ALIGNED == 0 for n in rows)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_MI, weight_EOI, counts_E)
        return _rows(x_MI, weight_EOI, counts_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, weight_EOI, counts_E = ctx.saved_tensors
        grad_x_MI = _rows(grad_MO, weight_EOI.transpose(1, 2), counts_E) if ctx.needs_input_grad[0] else None
        grad_weight_EOI = _outer(grad_MO, x_MI, counts_E) if ctx.needs_input_grad[1] else None
        return grad_x_MI, grad_weight_EOI, None


@torch.library.custom_op("titanyaml::grouped_rows", mutates_args=())
def _rows(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Each group's rows times its matrix transposed, [M, O]."""
    out_MO = x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])
    groups = zip(*(t.split(counts_E.tolist()) for t in (x_MI, out_MO)), weight_EOI, strict=True)
    for rows, out, matrix_OI in groups:
        torch.mm(rows, matrix_OI.t(), out=out)
    return out_MO


@torch.library.custom_op("titanyaml::grouped_outer", mutates_args=())
def _outer(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    """Each group's sum of outer products grad x^T, [E, O, I]."""
    out_EOI = x_MI.new_empty(counts_E.shape[0], grad_MO.shape[1], x_MI.shape[1])
    for grads, rows, out in zip(*(t.split(counts_E.tolist()) for t in (grad_MO, x_MI)), out_EOI, strict=True):
        torch.mm(grads.t(), rows, out=out)
    return out_EOI


@_rows.register_fake
def _(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    return x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])


@_outer.register_fake
def _(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    return x_MI.new_empty(counts_E.shape[0], grad_MO.shape[1], x_MI.shape[1])


@register_flop_formula(torch.ops.titanyaml.grouped_rows)
def _(x_shape: Any, weight_shape: Any, counts_shape: Any, **_: Any) -> int:
    return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.titanyaml.grouped_outer)
def _(grad_shape: Any, x_shape: Any, counts_shape: Any, **_: Any) -> int:
    return 2 * grad_shape[0] * grad_shape[1] * x_shape[1]
