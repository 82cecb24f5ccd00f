"""Two float8 copies of a matrix, one as it lies and one transposed, with their scales.

A float8 GEMM on Hopper wants both operands contiguous along the summed dimension, so activations, gradients and weights
are each needed in both layouts. Inductor casts in two kernels and reads or recomputes the source for the second one:
128 to 190 ms of a 3B model's step on an H200. One kernel that reads a tile and stores it both ways takes 26 to 44.

A number is stored as x * scale, where scale = largest float8 number / amax, the largest |x| of its row (rowwise) or of
the matrix (tensorwise). A GEMM needs the inverse scale. Finding the amax takes a pass of its own, 2 bytes a number;
the tensorwise one may instead begin with row maxima by a plain PyTorch operator, which a compiler puts into the kernel
that produces the matrix (norm, SwiGLU).

A weight gathered in float8 comes contiguous along its inputs, and the backward wants it along its outputs. Transposing
the gathered bytes moves 2 bytes a number; a cast of the bfloat16 weight would move 3.

Shapes: M rows, K columns. A source may have more dimensions, of which all but the last are rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import ceil_div, jit, operator, tl, wrap_triton

TILE_M, TILE_K, WARPS = 128, 64, 4  # the fastest of six on H200 for rowwise scales, 2 % off the fastest for tensorwise
PARTS, PART_TILE, PART_WARPS = 512, 8192, 8  # four programs a multiprocessor, of bfloat16 16 KB each under way
TRANSPOSE_TILE, TRANSPOSE_WARPS = 128, 8
SMALLEST = 1e-12  # a smaller amax counts as this: no division by zero


class Float8Copies(NamedTuple):
    """A row-major copy with its inverse scales, and the transposed one with its; None if it was not requested."""

    data_MK: Tensor | None
    inverse_M1: Tensor | None  # float32; [1, 1] for one scale of the matrix
    data_KM: Tensor | None
    inverse_K1: Tensor | None


def compute_amax(x: Tensor, *, rowwise: bool, fused: bool, by_producer: bool = False) -> Tensor:
    """The largest |x|, float32, from which scales are made.

    Args:
        x: contiguous, not empty, bfloat16 or float32. fused: the Triton kernels.
        by_producer: leave tensorwise row maxima to a compiler, for the kernel that produces ``x``.

    Returns:
        Rowwise: of each row, then of each column, [M + K]. Tensorwise: of parts of the matrix, [1, parts].
        A value that is not finite makes the amax of its row and column, or of the matrix, not finite.
    """
    if not rowwise:
        if not fused:
            return x.abs().amax().float().view(1, 1)
        return _partial_amax_operator(_matrix(x.abs().amax(-1, keepdim=True) if by_producer else x))
    if fused:
        return _amax_operator(_matrix(x))
    x_MK = x.flatten(0, -2)
    return torch.cat((x_MK.abs().amax(1), x_MK.abs().amax(0))).float()


def float8_cast(
    x: Tensor,
    amax: Tensor,
    *,
    dtype: torch.dtype,
    power_of_2: bool,
    fused: bool,
    row_major: bool = True,
    transposed: bool = True,
) -> Float8Copies:
    """Cast a matrix and its transpose; ``fused`` or not, the results are equal to the bit.

    Args:
        x: contiguous, not empty, bfloat16 or float32. amax: from ``compute_amax``; decides between one scale and one
            a row. dtype: float8_e4m3fn or float8_e5m2. power_of_2: round scales down to powers of two.
        fused: the Triton kernel, else plain PyTorch. row_major, transposed: which copies are made.

    A value that is not finite makes its row and column, or everything, NaN.
    """
    if fused:
        tensors = _cast_operator(_matrix(x), amax, dtype, power_of_2, row_major, transposed)
    else:
        x_MK = x.flatten(0, -2)
        rows = x_MK.shape[0]
        by_row = by_column = amax.amax().view(1, 1)
        if amax.ndim == 1:
            by_row, by_column = amax[:rows, None], amax[rows:, None]
        tensors = [*_plain_cast(x_MK, by_row, dtype, power_of_2)] if row_major else []
        tensors += _plain_cast(x_MK.t(), by_column, dtype, power_of_2) if transposed else ()
    nothing = (None, None)
    return Float8Copies(*(tensors[:2] if row_major else nothing), *(tensors[-2:] if transposed else nothing))


def transpose_float8(x_MK: Tensor, *, after: Tensor, fused: bool) -> Tensor:
    """The transpose [K, M], contiguous, of a contiguous float8 matrix. ``after``: not read, but awaited."""
    # A compiler that cuts a graph into forward and backward sees two tensors of one size. It might transpose early and
    # keep the result, under FSDP of full weights. An argument that only the backward pass has ties the launch to it.
    return _transpose_operator(x_MK, after) if fused else x_MK.view(torch.uint8).t().contiguous().view(x_MK.dtype)


def _plain_cast(x: Tensor, amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """One float8 copy, contiguous, and its inverse scale; ``amax`` is broadcast against x."""
    # a true division, as in the kernel: a number divided by a tensor is multiplied by a rounded reciprocal
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax.clamp(min=SMALLEST)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
    return (x.float() * scale).to(dtype).contiguous(), torch.ones_like(scale) / scale


def _matrix(x: Tensor) -> Tensor:
    # as_strided makes a compiler write x to memory once. With any other view of a value that is not computed yet, every
    # kernel that reads it would get a copy of its own (Inductor, torch 2.11).
    columns = x.shape[-1]
    return x.as_strided((x.numel() // columns, columns), (columns, 1))


def _grid(rows: int, columns: int) -> tuple[int, int]:
    # programs by columns first: neighbours in a row follow each other, and share cache lines
    return ceil_div(columns, TILE_K), ceil_div(rows, TILE_M)


def _amax(x: Tensor) -> Tensor:
    rows, columns = x.shape
    # Start values from the numbers themselves, not zeros: a compiler makes equal zeros once and copies them each time.
    amax = torch.cat((x[:, 0], x[0])).abs().float()
    tiling = {"TILE_M": TILE_M, "TILE_K": TILE_K, "num_warps": WARPS}
    wrap_triton(float8_amax_kernel)[_grid(rows, columns)](x, amax, rows, columns, **tiling)
    return amax


def _empty_amax(x: Tensor) -> Tensor:
    return x.new_empty(sum(x.shape), dtype=torch.float32)


def _partial_amax(x: Tensor) -> Tensor:
    amax, size = _empty_partial_amax(x), x.numel()
    parts = amax.numel()
    turns = ceil_div(size, PART_TILE * parts)
    wrap_triton(float8_partial_amax_kernel)[(parts,)](x, amax, size, TURNS=turns, TILE=PART_TILE, num_warps=PART_WARPS)
    return amax


def _empty_partial_amax(x: Tensor) -> Tensor:
    # a power of two, since one Triton range reads them all
    parts = min(PARTS, 1 << (ceil_div(x.numel(), PART_TILE).bit_length() - 1))
    return x.new_empty((1, parts), dtype=torch.float32)


def _cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, power_of_2: bool, row_major: bool, transposed: bool
) -> list[Tensor]:
    tensors = _empty_cast(x, amax, dtype, power_of_2, row_major, transposed)
    rows, columns = x.shape
    unused = (x, x)  # a kernel takes no None
    outputs = *(tensors[:2] if row_major else unused), *(tensors[-2:] if transposed else unused)
    parts = 0 if amax.ndim == 1 else amax.numel()
    scaling = {"PARTS": parts, "TOP": torch.finfo(dtype).max, "SMALLEST": SMALLEST, "POWER_OF_2": power_of_2}
    tiling = {"TILE_M": TILE_M, "TILE_K": TILE_K, "num_warps": WARPS}
    wrap_triton(float8_cast_kernel)[_grid(rows, columns)](
        x, amax, *outputs, rows, columns, ROW_MAJOR=row_major, TRANSPOSED=transposed, **scaling, **tiling
    )
    return tensors


def _empty_cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, power_of_2: bool, row_major: bool, transposed: bool
) -> list[Tensor]:
    (rows, columns), tensors = x.shape, []
    for shape, is_requested in (((rows, columns), row_major), ((columns, rows), transposed)):
        if not is_requested:
            continue
        # one scale is [1, 1]: an output without dimensions would first be filled by a kernel (Inductor, torch 2.11)
        num_scales = shape[0] if amax.ndim == 1 else 1
        tensors += [x.new_empty(shape, dtype=dtype), x.new_empty((num_scales, 1), dtype=torch.float32)]
    return tensors


def _transpose(x: Tensor, after: Tensor) -> Tensor:
    rows, columns = x.shape
    transposed = _empty_transpose(x, after)
    grid = ceil_div(columns, TRANSPOSE_TILE), ceil_div(rows, TRANSPOSE_TILE)
    tiling = {"TILE": TRANSPOSE_TILE, "num_warps": TRANSPOSE_WARPS}
    wrap_triton(float8_transpose_kernel)[grid](x, after, transposed, rows, columns, **tiling)
    return transposed


def _empty_transpose(x: Tensor, after: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


@jit
def float8_amax_kernel(x_ptr, amax_ptr, rows, columns, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Largest |x| of every row, then of every column."""
    row = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    # Maxima of the float32 bits: those of numbers >= 0 are in the order of the numbers, and infinity and NaN are above
    # all. So an integer atomic serves, and a value that is not finite wins.
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(bits_ptr + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
    tl.atomic_max(bits_ptr + rows + column, tl.max(bits, 0), mask=column < columns, sem="relaxed")


@jit
def float8_partial_amax_kernel(x_ptr, amax_ptr, size, TURNS: tl.constexpr, TILE: tl.constexpr):
    """Largest |x| of TURNS tiles, for each program. The cast reads them all: no atomics and no start value."""
    lanes = tl.arange(0, TILE)
    bits = tl.zeros([TILE], tl.int32)
    for turn in range(0, TURNS):
        start = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * TILE
        x = tl.load(x_ptr + start + lanes, mask=lanes < size - start, other=0.0)
        bits = tl.maximum(bits, tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))  # as bits: see above
    tl.store(amax_ptr + tl.program_id(0), tl.max(bits, 0).to(tl.float32, bitcast=True))


@jit
def scale_of(amax, TOP: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    amax = tl.where(amax < SMALLEST, SMALLEST, amax)  # a comparison, not a maximum: NaN stays
    scale = tl.div_rn(TOP, amax)
    if POWER_OF_2:  # scaling by one never rounds
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@jit
def float8_cast_kernel(
    x_ptr, amax_ptr, data_ptr, inverse_ptr, transposed_ptr, transposed_inverse_ptr, rows, columns, PARTS: tl.constexpr,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr, ROW_MAJOR: tl.constexpr,
    TRANSPOSED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile and its transpose, or one of them. PARTS: how many maxima the matrix has; 0: scales by row and column."""
    row = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    transposed_offsets = column[:, None].to(tl.int64) * rows + row[None, :]
    transposed_inside = (column < columns)[:, None] & (row < rows)[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if PARTS == 0:
        if ROW_MAJOR:
            by_row = scale_of(tl.load(amax_ptr + row, mask=row < rows, other=1.0), TOP, SMALLEST, POWER_OF_2)
            tl.store(data_ptr + offsets, (x * by_row[:, None]).to(data_ptr.dtype.element_ty), mask=inside)
            if tl.program_id(0) == 0:
                tl.store(inverse_ptr + row, tl.div_rn(1.0, by_row), mask=row < rows)
        if TRANSPOSED:
            by_column = tl.load(amax_ptr + rows + column, mask=column < columns, other=1.0)
            by_column = scale_of(by_column, TOP, SMALLEST, POWER_OF_2)
            tile = (x * by_column[None, :]).to(transposed_ptr.dtype.element_ty)
            tl.store(transposed_ptr + transposed_offsets, tl.trans(tile), mask=transposed_inside)
            if tl.program_id(1) == 0:
                tl.store(transposed_inverse_ptr + column, tl.div_rn(1.0, by_column), mask=column < columns)
    else:
        bits = tl.load(amax_ptr + tl.arange(0, PARTS)).to(tl.int32, bitcast=True)
        scale = scale_of(tl.max(bits, 0).to(tl.float32, bitcast=True), TOP, SMALLEST, POWER_OF_2)
        is_first_program = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        if ROW_MAJOR:
            tl.store(data_ptr + offsets, (x * scale).to(data_ptr.dtype.element_ty), mask=inside)
            if is_first_program:
                tl.store(inverse_ptr, tl.div_rn(1.0, scale))
        if TRANSPOSED:
            tile = (x * scale).to(transposed_ptr.dtype.element_ty)
            tl.store(transposed_ptr + transposed_offsets, tl.trans(tile), mask=transposed_inside)
            if is_first_program:
                tl.store(transposed_inverse_ptr, tl.div_rn(1.0, scale))


@jit
def float8_transpose_kernel(x_ptr, after_ptr, transposed_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    transposed_offsets = column[:, None].to(tl.int64) * rows + row[None, :]
    tile = tl.load(x_ptr + offsets, mask=(row < rows)[:, None] & (column < columns)[None, :])
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(transposed_ptr + transposed_offsets, tl.trans(tile), mask=inside)


# behind the kernels, whose source is part of the key by which compiled code is cached
_amax_operator = operator("titanyaml::float8_amax", _amax, _empty_amax)
_partial_amax_operator = operator("titanyaml::float8_partial_amax", _partial_amax, _empty_partial_amax)
_cast_operator = operator("titanyaml::float8_cast", _cast, _empty_cast)
_transpose_operator = operator("titanyaml::transpose_float8", _transpose, _empty_transpose)
