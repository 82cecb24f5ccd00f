"""A linear layer whose matrix products are in float8, on the cast that makes both copies of an operand at once.

Forward y = x w^T, input gradient dx = dy w, weight gradient dw = dy^T x. Each operand is scaled along the rows that its
product does not sum over (rowwise), or by one number (tensorwise). The casts of the forward pass make the transposed
copies for the backward pass as well, so that 8-bit activations are kept and nothing is cast twice.

On a CPU the products are emulated: the same float8 numbers, multiplied in float32.

Shapes: M tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanyaml.dist import compat
from titanyaml.kernels.float8_cast import Float8, cast_with, float8_cast

#: ``rowwise_with_gw_hp``: rowwise, with the weight gradient in the dtype of the input.
Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
E4M3 = torch.float8_e4m3fn


def float8_linear(
    x: Tensor, w_NK: Tensor, *, recipe: Recipe, fast_accum: bool, grad_dtype: torch.dtype = E4M3, fused: bool = False
) -> Tensor:
    """x w^T in x's dtype, with gradients.

    Args:
        x: [..., K], bfloat16 (on a CPU float32 too). w_NK: same dtype. On a GPU, K, N and the tokens divide by 16.
        recipe: granularity of the scales. Rowwise ones are powers of two, so that scaling itself never rounds.
        fast_accum: the two gradient products add in the tensor core's short accumulator; the forward always does.
        grad_dtype: float8_e4m3fn, or float8_e5m2 with more range and one bit less precision.
        fused: cast by the Triton kernels (``float8_cast``).
    """
    assert x.dtype == w_NK.dtype and x.shape[-1] == w_NK.shape[1], (x.dtype, w_NK.dtype, x.shape, w_NK.shape)
    y_MN = _Float8Linear.apply(x.reshape(-1, x.shape[-1]), w_NK, recipe, fast_accum, grad_dtype, fused)
    return y_MN.reshape(*x.shape[:-1], w_NK.shape[0])


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, recipe: Recipe, fast_accum: bool, grad_dtype: torch.dtype, fused: bool
    ) -> Tensor:
        ctx.recipe, ctx.fast_accum, ctx.grad_dtype, ctx.fused = recipe, fast_accum, grad_dtype, fused
        w = _cast(w_NK, recipe, E4M3, fused)
        if recipe == "rowwise_with_gw_hp":
            data, inverse = _one_copy(x_MK, E4M3)
            ctx.save_for_backward(x_MK, w.data_KM, w.inverse_K1)
        else:
            data, inverse, *turned = _cast(x_MK, recipe, E4M3, fused)
            ctx.save_for_backward(*turned, w.data_KM, w.inverse_K1)
        return _product(data, inverse, w.data_MK, w.inverse_M1, fast_accum=True, dtype=x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        *x, w_KN, w_inverse = ctx.saved_tensors
        options = {"fast_accum": ctx.fast_accum, "dtype": grad_MN.dtype}
        if ctx.recipe == "rowwise_with_gw_hp":
            data, inverse = _one_copy(grad_MN, ctx.grad_dtype)
            grad_w = grad_MN.t() @ x[0] if ctx.needs_input_grad[1] else None
        else:
            data, inverse, *turned = _cast(grad_MN, ctx.recipe, ctx.grad_dtype, ctx.fused)
            grad_w = _product(*turned, *x, **options) if ctx.needs_input_grad[1] else None
        grad_x = _product(data, inverse, w_KN, w_inverse, **options) if ctx.needs_input_grad[0] else None
        return grad_x, grad_w, None, None, None, None


def _cast(x: Tensor, recipe: Recipe, dtype: torch.dtype, fused: bool) -> Float8:
    rowwise = recipe != "tensorwise"
    return float8_cast(x, rowwise=rowwise, dtype=dtype, power_of_2=rowwise, fused=fused)


def _one_copy(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rowwise, without the transposed copy: a compiler makes one kernel of it."""
    return cast_with(x_MK, x_MK.abs().amax(1, keepdim=True), dtype=dtype, power_of_2=True)


def _product(
    a_MK: Tensor, inverse_a: Tensor, b_NK: Tensor, inverse_b: Tensor, *, fast_accum: bool, dtype: torch.dtype
) -> Tensor:
    """a b^T in ``dtype``, both operands float8 and contiguous along the summed dimension."""
    if a_MK.is_cuda:
        return compat.scaled_mm(a_MK, b_NK.t(), inverse_a, inverse_b.t(), fast_accum=fast_accum, dtype=dtype)
    return ((a_MK.float() @ b_NK.float().t()) * inverse_a * inverse_b.t()).to(dtype)
