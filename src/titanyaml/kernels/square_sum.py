"""The sum of the squares of many tensors in one read of each.

PyTorch's multi-tensor norm reads 2.3 TB/s of bfloat16 gradients on an H200, where a copy moves 4.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import ceil_div, jit, tl

BLOCK, BLOCKS, WARPS = 8192, 8, 8


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """0-dim, float64, of bfloat16, float16 or float32 tensors on one device; one that is not contiguous is copied."""
    # One program sums 65,536 squares in float32, and these sums are summed in float64: accurate at any size, and always
    # in the same order, so that ranks with equal gradients get equal norms.
    num_programs = [ceil_div(t.numel(), BLOCK * BLOCKS) for t in tensors]
    sums = torch.empty(sum(num_programs), dtype=torch.float32, device=tensors[0].device)
    for tensor, own in zip(tensors, sums.split(num_programs), strict=True):
        if n := tensor.numel():
            square_sum_kernel[(len(own),)](tensor.contiguous(), own, n, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=WARPS)
    return sums.sum(dtype=torch.float64)


@jit
def square_sum_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(BLOCKS):  # unrolled: all loads are under way at once
        offsets = begin + index * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))
