"""The transpose of a float8 matrix: read once, written once.

The backward pass wants a weight contiguous along its outputs, and a weight gathered in float8 comes along its inputs.
Transposing the gathered bytes moves 2 bytes a number; a cast of the bfloat16 weight would move 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import ceil_div, jit, operator, tl, wrap_triton

TILE, WARPS = 128, 8


def transpose_float8(x_MK: Tensor, *, after: Tensor, fused: bool) -> Tensor:
    """The transpose [K, M], contiguous, of a contiguous float8 matrix. ``after``: not read, but awaited.

    ``fused``: the Triton kernel, else plain PyTorch.
    """
    # A compiler that cuts a graph into forward and backward sees two tensors of one size. It might transpose early and
    # keep the result, under FSDP of full weights. An argument that only the backward pass has ties the launch to it.
    return _operator(x_MK, after) if fused else x_MK.view(torch.uint8).t().contiguous().view(x_MK.dtype)


def _run(x: Tensor, after: Tensor) -> Tensor:
    rows, columns = x.shape
    transposed = _empty(x, after)
    grid = ceil_div(columns, TILE), ceil_div(rows, TILE)
    wrap_triton(float8_transpose_kernel)[grid](x, after, transposed, rows, columns, TILE=TILE, num_warps=WARPS)
    return transposed


def _empty(x: Tensor, after: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


@jit
def float8_transpose_kernel(x_ptr, after_ptr, transposed_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    transposed_offsets = column[:, None].to(tl.int64) * rows + row[None, :]
    tile = tl.load(x_ptr + offsets, mask=(row < rows)[:, None] & (column < columns)[None, :])
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(transposed_ptr + transposed_offsets, tl.trans(tile), mask=inside)


_operator = operator("titanyaml::transpose_float8", _run, _empty)
