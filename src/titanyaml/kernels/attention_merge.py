"""Merge two partial attentions of the same queries in one pass: read both, write over the first.

With o1, o2 the outputs and l1, l2 the log-sum-exps over different keys, the attention over all keys is
l = log(e^l1 + e^l2), o = e^(l1-l) o1 + e^(l2-l) o2 (Milakov and Gimelshein 2018). Plain PyTorch needs float32 copies of
both outputs, their sum and its rounding.

Shapes: B batch, N heads, S queries, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import ceil_div, jit, next_power_of_2, tl

ROWS, WARPS = 16, 4


def merge_(out_BNSH: Tensor, lse_BNS: Tensor, part_BNSH: Tensor, part_lse_BNS: Tensor) -> None:
    """Merge the second pair into the first, rounded to its dtypes; arithmetic in float32.

    Args:
        out_BNSH, part_BNSH: any float dtype up to float32 and any strides, each head contiguous.
        lse_BNS, part_lse_BNS: float32, any strides.
    """
    batch, heads, queries, size = out_BNSH.shape
    assert out_BNSH.stride(3) == part_BNSH.stride(3) == 1 and part_BNSH.shape == out_BNSH.shape
    assert lse_BNS.dtype == part_lse_BNS.dtype == torch.float32 and part_lse_BNS.shape == lse_BNS.shape
    if out_BNSH.numel():
        tensors = out_BNSH, lse_BNS, part_BNSH, part_lse_BNS
        strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
        grid = ceil_div(queries, ROWS), heads, batch
        merge_kernel[grid](*tensors, queries, size, *strides, ROWS=ROWS, SIZE=next_power_of_2(size), num_warps=WARPS)


def reference_(out_BNSH: Tensor, lse_BNS: Tensor, part_BNSH: Tensor, part_lse_BNS: Tensor) -> None:
    """``merge_`` in plain PyTorch; in float64 if the log-sum-exps are."""
    merged_lse_BNS1 = torch.logaddexp(lse_BNS, part_lse_BNS).unsqueeze(-1)
    factor, part_factor = ((lse.unsqueeze(-1) - merged_lse_BNS1).exp() for lse in (lse_BNS, part_lse_BNS))
    out_BNSH.copy_(factor * out_BNSH + part_factor * part_BNSH)
    lse_BNS.copy_(merged_lse_BNS1.squeeze(-1))


@jit
def merge_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, queries, size, out_b, out_n, out_s, lse_b, lse_n, lse_s,
    part_b, part_n, part_s, part_lse_b, part_lse_n, part_lse_s, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program for ROWS queries of a head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    is_query = row < queries
    row = row.to(tl.int64)  # offsets of a long sequence exceed 2^31
    column = tl.arange(0, SIZE)
    inside = is_query[:, None] & (column < size)[None, :]
    lse_ptrs = lse_ptr + sequence * lse_b + head * lse_n + row * lse_s
    part_lse_ptrs = part_lse_ptr + sequence * part_lse_b + head * part_lse_n + row * part_lse_s
    lse = tl.load(lse_ptrs, mask=is_query, other=0.0)
    part_lse = tl.load(part_lse_ptrs, mask=is_query, other=0.0)
    larger = tl.maximum(lse, part_lse)  # subtracted before exponentials, which would overflow
    merged_lse = larger + tl.log(tl.exp(lse - larger) + tl.exp(part_lse - larger))
    out_ptrs = out_ptr + (sequence * out_b + head * out_n + row * out_s)[:, None] + column[None, :]
    part_ptrs = part_ptr + (sequence * part_b + head * part_n + row * part_s)[:, None] + column[None, :]
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32) * tl.exp(lse - merged_lse)[:, None]
    out += tl.load(part_ptrs, mask=inside, other=0.0).to(tl.float32) * tl.exp(part_lse - merged_lse)[:, None]
    tl.store(lse_ptrs, merged_lse, mask=is_query)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
