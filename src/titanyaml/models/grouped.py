"""Grouped GEMM: rows sorted into groups, each group with its own matrix. It computes a mixture's experts.

Shapes: M rows, sorted by group; E groups; I, O features in and out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from titanyaml.distributed import compat

_ALIGNMENT = 16  # bytes; torch's grouped GEMM takes only rows that begin at multiples of it


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply each row of group e by ``weight_EOI[e]`` transposed: [M, O] in x's dtype, which is the weight's.
    ``counts_E``: int64 rows per group, which may be 0; their sum is M. Gradients of empty groups are zeros.
    """
    # one kernel on a GPU in bfloat16; elsewhere a loop over the groups
    if kernel_supports(x_MI, weight_EOI):
        return compat.grouped_mm(x_MI, weight_EOI.transpose(1, 2), counts_E.cumsum(0).to(torch.int32))
    return _apply(x_MI, weight_EOI, counts_E)


def kernel_supports(x_MI: Tensor, weight_EOI: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these: bfloat16 on a GPU, rows aligned."""
    row_lengths = (x_MI.shape[-1], weight_EOI.shape[-2])
    is_aligned = all(length * x_MI.itemsize % _ALIGNMENT == 0 for length in row_lengths)
    return x_MI.is_cuda and x_MI.dtype == torch.bfloat16 and is_aligned


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_MI, weight_EOI, counts_E)
        out_MO: Tensor = _multiply_rows(x_MI, weight_EOI, counts_E)
        return out_MO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, weight_EOI, counts_E = ctx.saved_tensors
        grad_x_MI = _multiply_rows(grad_MO, weight_EOI.transpose(1, 2), counts_E) if ctx.needs_input_grad[0] else None
        grad_weight_EOI = _sum_outer(grad_MO, x_MI, counts_E) if ctx.needs_input_grad[1] else None
        return grad_x_MI, grad_weight_EOI, None


_apply: Callable[..., Tensor] = _GroupedLinear.apply


# The loops are custom operators: the rows of a group are known at run time only, so that slices in the graph would have
# data-dependent shapes and break it. Outside of the operators no shape depends on the data.
@torch.library.custom_op("titanyaml::grouped_rows", mutates_args=())
def _multiply_rows(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Each group's rows times its matrix transposed, [M, O]."""
    out_MO = x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])
    counts = counts_E.tolist()
    for rows, out, matrix_OI in zip(torch.split(x_MI, counts), torch.split(out_MO, counts), weight_EOI, strict=True):
        torch.mm(rows, matrix_OI.t(), out=out)
    return out_MO


@torch.library.custom_op("titanyaml::grouped_outer", mutates_args=())
def _sum_outer(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    """Each group's sum of outer products grad x^T: the gradient of its matrix, [E, O, I]."""
    out_EOI = x_MI.new_empty(counts_E.shape[0], grad_MO.shape[1], x_MI.shape[1])
    counts = counts_E.tolist()
    for grads, rows, out in zip(torch.split(grad_MO, counts), torch.split(x_MI, counts), out_EOI, strict=True):
        torch.mm(grads.t(), rows, out=out)
    return out_EOI


@_multiply_rows.register_fake
def _(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    return x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])


@_sum_outer.register_fake
def _(grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor) -> Tensor:
    return x_MI.new_empty(counts_E.shape[0], grad_MO.shape[1], x_MI.shape[1])


@register_flop_formula(torch.ops.titanyaml.grouped_rows)
def _(x_shape: torch.Size, weight_shape: torch.Size, counts_shape: torch.Size, **_: Any) -> int:
    return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.titanyaml.grouped_outer)
def _(grad_shape: torch.Size, x_shape: torch.Size, counts_shape: torch.Size, **_: Any) -> int:
    return 2 * grad_shape[0] * grad_shape[1] * x_shape[1]
