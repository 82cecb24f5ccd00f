"""Two float8 copies of a matrix, one as it lies and one transposed, with their scales.

A Hopper float8 product wants both operands contiguous along the summed dimension, so activations, gradients and weights
are each needed twice. A compiler casts twice, and reads or computes the source again for the second; here one kernel
reads a tile and writes it both ways.

A number is stored as x * scale, where scale = largest float8 / largest |x| of its row (rowwise), or of the whole
(tensorwise). What a product needs is the inverse of the scale.

Shapes: M rows, K columns. A source may have more dimensions, of which all but the last are rows.

The largest numbers take a pass of their own, 2 bytes a number. That of the whole may also begin with those of the rows
by a plain PyTorch operator, which a compiler puts into the kernel that makes the matrix (norm, SwiGLU).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import jit, operator, tl, wrap_triton

TILE_M, TILE_K, WARPS = 128, 64, 4  # the fastest of six on H200 for rowwise scales, 2 % off the fastest for tensorwise
PARTS, PART_TILE, PART_WARPS = 512, 8192, 8  # four programs a multiprocessor, of bfloat16 16 KB each under way
SMALLEST = 1e-12  # a maximum below it counts as this: no division by zero


class Float8(NamedTuple):
    """Row-major values, their inverse scale, and the same of the transpose; None: not asked for.

    data_MK, data_KM: float8. inverse_M1, inverse_K1: float32, or [1, 1] where the scale is the whole matrix's.
    """

    data_MK: Tensor | None
    inverse_M1: Tensor | None
    data_KM: Tensor | None
    inverse_K1: Tensor | None


def largest(x: Tensor, *, rowwise: bool, fused: bool, where_made: bool = False) -> Tensor:
    """The largest |x| that the scales are made of, float32.

    Args:
        x: contiguous, not empty, bfloat16 or float32. fused: the Triton kernels.
        where_made: of the whole, those of the rows are left to a compiler, for the kernel that makes ``x``.

    Returns:
        Of each row, then of each column, [M + K]; or of parts of the whole, [1, parts], as many as come.
        What is not finite makes that of its row and column, or of the whole, not finite.
    """
    if not rowwise:
        if not fused:
            return x.abs().amax().float().view(1, 1)
        return _partial_amax_operator(_matrix(x.abs().amax(-1, keepdim=True) if where_made else x))
    if fused:
        return _amax_operator(_matrix(x))
    x_MK = x.flatten(0, -2)
    return torch.cat((x_MK.abs().amax(1), x_MK.abs().amax(0))).float()


def float8_cast(
    x: Tensor,
    largest: Tensor,
    *,
    dtype: torch.dtype,
    power_of_2: bool,
    fused: bool,
    straight: bool = True,
    turned: bool = True,
) -> Float8:
    """Cast a matrix and its transpose.

    Args:
        x: contiguous, not empty, bfloat16 or float32. largest: as from ``largest``: one scale for all, or one a row.
        dtype: float8_e4m3fn or float8_e5m2. power_of_2: scales are rounded down to powers of two.
        fused: the Triton kernel; else plain PyTorch.
        straight, turned: which of the two copies are made.

    Returns:
        Equal to the bit either way. What is not finite makes its row and column, or everything, NaN.
    """
    if fused:
        made = _cast_operator(_matrix(x), largest, dtype, power_of_2, straight, turned)
    else:
        x_MK = x.flatten(0, -2)
        size = x_MK.shape[0]
        whole = (largest.amax().view(1, 1),) * 2
        rows, columns = whole if largest.ndim == 2 else (largest[:size, None], largest[size:, None])
        made = [*_plain(x_MK, rows, dtype, power_of_2)] if straight else []
        made += _plain(x_MK.t(), columns, dtype, power_of_2) if turned else ()
    nothing = (None, None)
    return Float8(*(made[:2] if straight else nothing), *(made[-2:] if turned else nothing))


def _plain(x: Tensor, largest: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """One float8 copy, contiguous, and the inverse scale, given the largest absolute values (broadcast against x)."""
    # a true division: a number divided by a tensor is multiplied by a rounded reciprocal
    top = torch.full_like(largest, torch.finfo(dtype).max)
    scale = top / largest.clamp(min=SMALLEST)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (x.float() * scale).to(dtype).contiguous(), torch.ones_like(scale) / scale


def _matrix(x: Tensor) -> Tensor:
    """A contiguous tensor as [M, K].

    By ``as_strided``, for which a compiler puts it into memory: of any other view, not computed yet, every kernel that
    reads it would get a copy of its own (Inductor, torch 2.11).
    """
    columns = x.shape[-1]
    return x.as_strided((x.numel() // columns, columns), (columns, 1))


def _grid(rows: int, columns: int) -> tuple[int, int]:
    """Programs by columns and rows. Neighbours in a row follow each other: they share cache lines."""
    return -(-columns // TILE_K), -(-rows // TILE_M)


def _largest(x: Tensor) -> Tensor:
    rows, columns = x.shape
    # from some of the numbers, not from zeros: a compiler would make equal zeros once, and copy them for every call
    found = torch.cat((x[:, 0], x[0])).abs().float()
    wrap_triton(float8_largest_kernel)[_grid(rows, columns)](
        x, found, rows, columns, TILE_M=TILE_M, TILE_K=TILE_K, num_warps=WARPS
    )
    return found


def _parts(x: Tensor) -> Tensor:
    found = _empty_parts(x)
    parts, size = found.numel(), x.numel()
    turns = -(-size // (PART_TILE * parts))
    wrap_triton(float8_parts_kernel)[(parts,)](x, found, size, TURNS=turns, TILE=PART_TILE, num_warps=PART_WARPS)
    return found


def _cast(
    x: Tensor, largest: Tensor, dtype: torch.dtype, power_of_2: bool, straight: bool, turned: bool
) -> list[Tensor]:
    made = _empty(x, largest, dtype, power_of_2, straight, turned)
    rows, columns = x.shape
    unread = (x, x)  # for a copy that is not made
    wrap_triton(float8_cast_kernel)[_grid(rows, columns)](
        x,
        largest,
        *(made[:2] if straight else unread),
        *(made[-2:] if turned else unread),
        rows,
        columns,
        PARTS=0 if largest.ndim == 1 else largest.numel(),
        TOP=torch.finfo(dtype).max,
        SMALLEST=SMALLEST,
        POWER_OF_2=power_of_2,
        STRAIGHT=straight,
        TURNED=turned,
        TILE_M=TILE_M,
        TILE_K=TILE_K,
        num_warps=WARPS,
    )
    return made


def _empty_largest(x: Tensor) -> Tensor:
    return x.new_empty(sum(x.shape), dtype=torch.float32)


def _empty_parts(x: Tensor) -> Tensor:
    tiles = -(-x.numel() // PART_TILE)
    return x.new_empty((1, min(PARTS, 1 << (tiles.bit_length() - 1))), dtype=torch.float32)


def _empty(
    x: Tensor, largest: Tensor, dtype: torch.dtype, power_of_2: bool, straight: bool, turned: bool
) -> list[Tensor]:
    rows, columns = x.shape
    made = []
    for wanted, shape in ((straight, (rows, columns)), (turned, (columns, rows))):
        if wanted:
            made.append(x.new_empty(shape, dtype=dtype))
            made.append(x.new_empty((shape[0] if largest.ndim == 1 else 1, 1), dtype=torch.float32))
    return made


@jit
def float8_largest_kernel(x_ptr, largest_ptr, rows, columns, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Largest |x| of every row, then of every column."""
    row = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    # maxima as the bits of float32: those of numbers >= 0 are in the order of the numbers, and those of infinity and
    # NaN are above any: what is not finite must win
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    bits_ptr = largest_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(bits_ptr + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
    tl.atomic_max(bits_ptr + rows + column, tl.max(bits, 0), mask=column < columns, sem="relaxed")


@jit
def float8_parts_kernel(x_ptr, largest_ptr, size, TURNS: tl.constexpr, TILE: tl.constexpr):
    """Largest |x| of TURNS tiles, for each program. Who needs the whole's reads all: no atomics and no start value."""
    place = tl.arange(0, TILE)
    bits = tl.zeros([TILE], tl.int32)
    for turn in range(0, TURNS):
        start = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * TILE
        x = tl.load(x_ptr + start + place, mask=place < size - start, other=0.0)
        bits = tl.maximum(bits, tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))  # as bits: see above
    tl.store(largest_ptr + tl.program_id(0), tl.max(bits, 0).to(tl.float32, bitcast=True))


@jit
def scale_of(largest, TOP: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    # a comparison, not a maximum: NaN stays
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)
    scale = tl.div_rn(TOP, largest)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@jit
def float8_cast_kernel(
    x_ptr, largest_ptr, data_ptr, inverse_ptr, turned_ptr, turned_inverse_ptr, rows, columns, PARTS: tl.constexpr,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr, STRAIGHT: tl.constexpr, TURNED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile and its transpose, or one of them. PARTS: how many maxima the whole has; 0: scales by row and column."""
    row = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    turned_place = column[:, None].to(tl.int64) * rows + row[None, :]
    turned_inside = (column < columns)[:, None] & (row < rows)[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if PARTS == 0:
        if STRAIGHT:
            by_row = scale_of(tl.load(largest_ptr + row, mask=row < rows, other=1.0), TOP, SMALLEST, POWER_OF_2)
            tl.store(data_ptr + place, (x * by_row[:, None]).to(data_ptr.dtype.element_ty), mask=inside)
            if tl.program_id(0) == 0:
                tl.store(inverse_ptr + row, tl.div_rn(1.0, by_row), mask=row < rows)
        if TURNED:
            by_column = tl.load(largest_ptr + rows + column, mask=column < columns, other=1.0)
            by_column = scale_of(by_column, TOP, SMALLEST, POWER_OF_2)
            turned = (x * by_column[None, :]).to(turned_ptr.dtype.element_ty)
            tl.store(turned_ptr + turned_place, tl.trans(turned), mask=turned_inside)
            if tl.program_id(1) == 0:
                tl.store(turned_inverse_ptr + column, tl.div_rn(1.0, by_column), mask=column < columns)
    else:
        bits = tl.load(largest_ptr + tl.arange(0, PARTS)).to(tl.int32, bitcast=True)
        scale = scale_of(tl.max(bits, 0).to(tl.float32, bitcast=True), TOP, SMALLEST, POWER_OF_2)
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        if STRAIGHT:
            tl.store(data_ptr + place, (x * scale).to(data_ptr.dtype.element_ty), mask=inside)
            if first:
                tl.store(inverse_ptr, tl.div_rn(1.0, scale))
        if TURNED:
            turned = (x * scale).to(turned_ptr.dtype.element_ty)
            tl.store(turned_ptr + turned_place, tl.trans(turned), mask=turned_inside)
            if first:
                tl.store(turned_inverse_ptr, tl.div_rn(1.0, scale))


# behind the kernels, whose source is a part of what compiled code is cached by
_amax_operator = operator("titanyaml::float8_amax", _largest, _empty_largest)
_partial_amax_operator = operator("titanyaml::float8_partial_amax", _parts, _empty_parts)
_cast_operator = operator("titanyaml::float8_cast", _cast, _empty)
