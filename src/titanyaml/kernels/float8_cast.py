"""Two float8 copies of a matrix, one as it lies and one transposed, with their scales.

A Hopper float8 product wants both operands contiguous along the summed dimension, so activations, gradients and weights
are each needed twice. A compiler casts twice, reads the source again for the columns' maxima and computes it anew; here
one kernel reads it for all maxima, and one for both copies.

A number is stored as x * scale, where scale = largest float8 / largest |x| of its row (rowwise), or of the whole
(tensorwise). What a product needs is the inverse of the scale. Shapes: M rows, K columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanyaml.kernels.jit import jit, tl

TILE_M, TILE_K, WARPS = 128, 64, 4  # the fastest of six on H200 for rowwise scales, 2 % off the fastest for tensorwise
SMALLEST = 1e-12  # a maximum below it counts as this: no division by zero


class Float8(NamedTuple):
    """Row-major values, their inverse scale, and the same of the transpose.

    data_MK, data_KM: float8. inverse_M1, inverse_K1: float32, or 0-dim where the scale is the whole matrix's.
    """

    data_MK: Tensor
    inverse_M1: Tensor
    data_KM: Tensor
    inverse_K1: Tensor


def float8_cast(x_MK: Tensor, *, rowwise: bool, dtype: torch.dtype, power_of_2: bool, fused: bool) -> Float8:
    """Cast a matrix and its transpose.

    Args:
        x_MK: bfloat16 or float32. rowwise: a scale a row (of the transpose: a column), else one for all.
        dtype: float8_e4m3fn or float8_e5m2. power_of_2: scales are rounded down to powers of two.
        fused: the Triton kernels, as one operator that compilers leave alone; else plain PyTorch, which they see.

    Returns:
        Equal to the bit either way. What is not finite makes its row and column, or everything, NaN.
    """
    if fused:
        return Float8(*_operator(x_MK, rowwise, dtype, power_of_2))
    return reference(x_MK, rowwise=rowwise, dtype=dtype, power_of_2=power_of_2)


def reference(x_MK: Tensor, *, rowwise: bool, dtype: torch.dtype, power_of_2: bool) -> Float8:
    """``float8_cast`` in plain PyTorch."""
    if not rowwise:
        data, inverse = cast_with(x_MK, x_MK.abs().amax(), dtype=dtype, power_of_2=power_of_2)
        return Float8(data, inverse, data.t().contiguous(), inverse.clone())
    x_KM = x_MK.t()
    return Float8(
        *cast_with(x_MK, x_MK.abs().amax(1, keepdim=True), dtype=dtype, power_of_2=power_of_2),
        *cast_with(x_KM, x_KM.abs().amax(1, keepdim=True), dtype=dtype, power_of_2=power_of_2),
    )


def cast_with(x: Tensor, largest: Tensor, *, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """One float8 copy, contiguous, and the inverse scale, given the largest absolute values (broadcast against x)."""
    # a true division: a number divided by a tensor is multiplied by a rounded reciprocal
    top = torch.full_like(largest, torch.finfo(dtype).max, dtype=torch.float32)
    scale = top / largest.float().clamp(min=SMALLEST)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (x.float() * scale).to(dtype).contiguous(), torch.ones_like(scale) / scale


def _cast(x: Tensor, rowwise: bool, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    rows, columns = x.shape
    result = _empty(x, rowwise, dtype, power_of_2)
    # maxima as the bits of float32: those of numbers >= 0 are in the order of the numbers
    largest = torch.zeros(rows + columns if rowwise else 1, dtype=torch.int32, device=x.device)
    grid = (-(-columns // TILE_K), -(-rows // TILE_M))  # neighbours in a row follow each other: they share cache lines
    tile = {"ROWWISE": rowwise, "TILE_M": TILE_M, "TILE_K": TILE_K, "num_warps": WARPS}
    if x.numel():
        float8_maxima_kernel[grid](x, largest, rows, columns, **tile)
        float8_cast_kernel[grid](
            x, largest.view(torch.float32), *result, rows, columns, torch.finfo(dtype).max,
            SMALLEST=SMALLEST, POWER_OF_2=power_of_2, **tile,
        )
    return result


def _empty(x: Tensor, rowwise: bool, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    inverse = [x.new_empty((n, 1) if rowwise else (), dtype=torch.float32) for n in (rows, columns)]
    return (
        x.new_empty((rows, columns), dtype=dtype), inverse[0],
        x.new_empty((columns, rows), dtype=dtype), inverse[1],
    )


_operator = torch.library.custom_op("titanyaml::float8_cast", _cast, mutates_args=())
_operator.register_fake(_empty)


@jit
def float8_maxima_kernel(
    x_ptr, largest_ptr, rows, columns, ROWWISE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):  # fmt: skip
    """Largest |x| of every row, then of every column; or of the whole."""
    row = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    # what is not finite must win: the bits of infinity and NaN are above those of any number
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    if ROWWISE:
        tl.atomic_max(largest_ptr + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
        tl.atomic_max(largest_ptr + rows + column, tl.max(bits, 0), mask=column < columns, sem="relaxed")
    else:
        tl.atomic_max(largest_ptr, tl.max(tl.max(bits, 1), 0), sem="relaxed")


@jit
def _scale(largest, top, SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    # a comparison, not a maximum: NaN stays
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)
    scale = tl.div_rn(top, largest)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@jit
def float8_cast_kernel(
    x_ptr, largest_ptr, data_ptr, inverse_ptr, turned_ptr, turned_inverse_ptr, rows, columns, top,
    SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr, ROWWISE: tl.constexpr, TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile and its transpose."""
    row = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    turned_place = column[:, None].to(tl.int64) * rows + row[None, :]
    turned_inside = (column < columns)[:, None] & (row < rows)[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ROWWISE:
        by_row = _scale(tl.load(largest_ptr + row, mask=row < rows, other=1.0), top, SMALLEST, POWER_OF_2)
        by_column = _scale(
            tl.load(largest_ptr + rows + column, mask=column < columns, other=1.0), top, SMALLEST, POWER_OF_2
        )
        data = (x * by_row[:, None]).to(data_ptr.dtype.element_ty)
        turned = (x * by_column[None, :]).to(data_ptr.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(inverse_ptr + row, tl.div_rn(1.0, by_row), mask=row < rows)
        if tl.program_id(1) == 0:
            tl.store(turned_inverse_ptr + column, tl.div_rn(1.0, by_column), mask=column < columns)
    else:
        scale = _scale(tl.load(largest_ptr), top, SMALLEST, POWER_OF_2)
        data = (x * scale).to(data_ptr.dtype.element_ty)
        turned = data
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse_ptr, tl.div_rn(1.0, scale))
            tl.store(turned_inverse_ptr, tl.div_rn(1.0, scale))
    tl.store(data_ptr + place, data, mask=inside)
    tl.store(turned_ptr + turned_place, tl.trans(turned), mask=turned_inside)
