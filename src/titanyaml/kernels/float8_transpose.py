"""The transpose of a float8 matrix: read once, written once.

The backward pass wants a weight contiguous along its outputs. One that is gathered in float8 comes along its inputs.

A compiler that cuts a graph into forward and backward sees two tensors of one size, and may as well turn early and keep
what is turned: under FSDP whole weights. So the operator asks for something that only the backward pass has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import jit, operator, tl, wrap_triton

TILE, WARPS = 128, 8


def transpose_float8(x_MK: Tensor, *, after: Tensor, fused: bool) -> Tensor:
    """The transpose [K, M], contiguous.

    Args:
        x_MK: any float8 dtype, contiguous. after: any tensor, which must be there before the kernel is launched, and is
            not read. fused: the Triton kernel; else plain PyTorch.
    """
    return _operator(x_MK, after) if fused else x_MK.view(torch.uint8).t().contiguous().view(x_MK.dtype)


def _run(x: Tensor, after: Tensor) -> Tensor:
    rows, columns = x.shape
    turned = _empty(x, after)
    grid = (-(-columns // TILE), -(-rows // TILE))
    wrap_triton(float8_turn_kernel)[grid](x, after, turned, rows, columns, TILE=TILE, num_warps=WARPS)
    return turned


def _empty(x: Tensor, after: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


@jit
def float8_turn_kernel(x_ptr, after_ptr, turned_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    turned_place = column[:, None].to(tl.int64) * rows + row[None, :]
    tile = tl.load(x_ptr + place, mask=(row < rows)[:, None] & (column < columns)[None, :])
    tl.store(turned_ptr + turned_place, tl.trans(tile), mask=(column < columns)[:, None] & (row < rows)[None, :])


_operator = operator("titanyaml::transpose_float8", _run, _empty)
