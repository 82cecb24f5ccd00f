"""Float8 products whose sum is scattered along the sequence, slice by slice: while one travels the next is multiplied.

torch's own fused operator takes one float8 product whose left side is a reshaped three-dimensional tensor. Ours are
multiplied as matrices, and a block's backward scatters a sum of them, each with scales of its own. What the ranks send
each other is added up outside, where the compiler joins it with what is done to the sum.

Shapes: B batch, S sequence, M = B*S tokens, K inner and N output features, R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanyaml.distributed import compat


def float8_matmul_exchange(
    lefts: list[Tensor],
    rights: list[Tensor],
    left_scales: list[Tensor],
    right_scales: list[Tensor],
    batch: int,
    fast_accum: bool,
    dtype: torch.dtype,
    size: int,
    group_name: str,
) -> Tensor:
    """Every rank's sum of products in this rank's slice of the sequence, [R, B, S/R, N].

    Args:
        lefts, rights: float8 [M, K] and [K, N] of each product. left_scales, right_scales: inverse ones, [M, 1] and
            [1, N], or of one number. batch: B. fast_accum: of the products. dtype: theirs. size: R.
    """
    # what a product reads lies along the inner features
    rights = [right if right.stride(0) == 1 else right.t().contiguous().t() for right in rights]
    parts = [
        (
            _by_slice(left, batch, size),
            right,
            _by_slice(scale, batch, size) if scale.numel() > 1 else scale.expand(size, *scale.shape),
            other,
        )
        for left, right, scale, other in zip(lefts, rights, left_scales, right_scales, strict=True)
    ]
    how = {"fast_accum": fast_accum, "dtype": dtype}

    def multiply(rank: int, out_LN: Tensor) -> None:
        """The summand of a rank's slice, L = M/R tokens."""
        for index, (left_RLK, right_KN, scale_R, other) in enumerate(parts):
            if index:
                out_LN += compat.scaled_mm(left_RLK[rank], right_KN, scale_R[rank], other, **how)
            else:
                compat.scaled_mm(left_RLK[rank], right_KN, scale_R[rank], other, out=out_LN, **how)

    tokens, width = lefts[0].shape[0], rights[0].shape[1]
    slices_RLN = torch.empty(size, tokens // size, width, dtype=dtype, device=lefts[0].device)
    if slices_RLN.is_cuda:
        compat.produce_and_exchange(multiply, slices_RLN.flatten(0, 1), group_name)
    else:  # a check of function
        for rank in range(size):
            multiply(rank, slices_RLN[rank])
        slices_RLN = compat.all_to_all(slices_RLN, [1] * size, [1] * size, group_name)
    return slices_RLN.view(size, batch, -1, width)


def _by_slice(rows: Tensor, batch: int, size: int) -> Tensor:
    """[M, F] to [R, M/R, F]: the rows of each rank's slice of every sequence. One sequence is not copied."""
    raw, tokens = rows.contiguous(), rows.shape[0]
    raw = raw.view(torch.int64) if rows.element_size() == 1 else raw  # a copy by single bytes takes four times as long
    sliced = raw.view(batch, size, tokens // batch // size, -1).transpose(0, 1)
    return sliced.reshape(size, tokens // size, -1).view(rows.dtype)


operator = torch.library.custom_op("titanyaml::float8_matmul_exchange", float8_matmul_exchange, mutates_args=())


@operator.register_fake
def _(
    lefts: list[Tensor],
    rights: list[Tensor],
    left_scales: list[Tensor],
    right_scales: list[Tensor],
    batch: int,
    fast_accum: bool,
    dtype: torch.dtype,
    size: int,
    group_name: str,
) -> Tensor:
    tokens, width = lefts[0].shape[0], rights[0].shape[1]
    return lefts[0].new_empty(size, batch, tokens // batch // size, width, dtype=dtype)
