"""A sum of float8 matmuls, scattered along the sequence: one rank's slice travels while the next is multiplied.

torch's fused operator takes one float8 matmul whose left side is a reshaped three-dimensional tensor. Ours have
matrices, and a block's backward scatters a sum of two or three, each with scales of its own, so that they cannot become
one matmul. What the ranks send is added up outside: there Inductor joins the sum with what reads it. Formed in here,
the sum of two slices took 0.2 ms a place and async TP lost with float8 (docs/decisions.md).

Shapes: B batch, S sequence, M = B*S tokens, K inner and N output features, R ranks, L = M/R tokens of a rank's slice.
"""

from typing import Any

import torch
from torch import Tensor

from titanyaml.distributed import compat


def float8_matmul_exchange(
    lefts: list[Tensor], rights: list[Tensor], left_scales: list[Tensor], right_scales: list[Tensor],
    batch: int, fast_accum: bool, dtype: torch.dtype, size: int, group_name: str,
) -> Tensor:  # fmt: skip
    """Every rank's sum of matmuls in this rank's slice of the sequence, [R, B, S/R, N]; the caller adds over R.

    Args:
        lefts, rights: float8 [M, K] and [K, N] of each matmul.
        left_scales, right_scales: inverse scales, [M, 1] and [1, N], or of one number.
        batch: B. fast_accum: add in the short accumulator. dtype: of the products. size: R.
    """
    # Hopper's float8 GEMM reads both sides contiguous along K
    rights = [right if right.stride(0) == 1 else right.t().contiguous().t() for right in rights]
    lefts_RLK = [_slice_by_rank(left_MK, batch, size) for left_MK in lefts]
    left_scales_R = [
        _slice_by_rank(scale, batch, size) if scale.numel() > 1 else scale.expand(size, *scale.shape)
        for scale in left_scales
    ]

    def multiply(rank: int, out_LN: Tensor) -> None:
        """This rank's summand of another rank's slice. One matmul writes, the others are added in its dtype."""
        operands = zip(lefts_RLK, rights, left_scales_R, right_scales, strict=True)
        for index, (left_RLK, right_KN, scale_R, right_scale) in enumerate(operands):
            sides, out = (left_RLK[rank], right_KN, scale_R[rank], right_scale), None if index else out_LN
            product_LN = compat.scaled_mm(*sides, fast_accum=fast_accum, dtype=dtype, out=out)
            if index:
                out_LN += product_LN

    tokens, width = lefts[0].shape[0], rights[0].shape[1]
    slices_RLN = torch.empty(size, tokens // size, width, dtype=dtype, device=lefts[0].device)
    if slices_RLN.is_cuda:
        compat.produce_and_exchange(multiply, slices_RLN.flatten(0, 1), group_name)
    else:  # no symmetric memory: multiply, then exchange
        for rank in range(size):
            multiply(rank, slices_RLN[rank])
        slices_RLN = compat.all_to_all(slices_RLN, [1] * size, [1] * size, group_name)
    return slices_RLN.view(size, batch, -1, width)


def _slice_by_rank(rows: Tensor, batch: int, size: int) -> Tensor:
    """[M, F] to [R, M/R, F]: the rows of each rank's slice of every sequence. One sequence is not copied."""
    tokens, words = rows.shape[0], rows.contiguous()
    if rows.element_size() == 1:
        words = words.view(torch.int64)  # float8 rows copied byte by byte take four times as long
    sliced = words.view(batch, size, tokens // batch // size, -1).transpose(0, 1)
    return sliced.reshape(size, tokens // size, -1).view(rows.dtype)


operator = torch.library.custom_op("titanyaml::float8_matmul_exchange", float8_matmul_exchange, mutates_args=())


@operator.register_fake
def _(lefts: list[Tensor], rights: list[Tensor], *options: Any) -> Tensor:
    _, _, batch, _, dtype, size, _ = options
    tokens, width = lefts[0].shape[0], rights[0].shape[1]
    return lefts[0].new_empty(size, batch, tokens // batch // size, width, dtype=dtype)
