"""Inputs of one call of the loss, and the gradient of the head's weight: a float32 sum over chunks, rounded once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titanyaml.distributed.tensor import TensorGroup
from titanyaml.loss import wide_matmul


class HeadGradient:
    """Accumulates grad_CV^T @ hidden_CD over chunks, in float32 where the weight is narrower."""

    PIECE = 2**24  # elements rounded at a time; a piece needs a temporary copy in the narrow dtype

    def __init__(self, weight_VD: Tensor) -> None:
        self.shape, self.dtype, self.device = weight_VD.shape, weight_VD.dtype, weight_VD.device
        self.wide_dtype = torch.promote_types(self.dtype, torch.float32)
        num_rows = self.shape[0]
        # A multiple of 8 rows: the second half's columns in a row of bfloat16 logits then begin at a multiple of 16
        # bytes, the alignment that fast GEMM kernels require.
        half = num_rows if self.dtype == self.wide_dtype else min(num_rows, -(-num_rows // 16) * 8)
        self.halves = (slice(0, half), slice(half, None)) if half < num_rows else (slice(None),)
        self.sums: list[Tensor] = []

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add the gradient of one chunk."""
        if not self.sums:  # the first chunk's GEMM writes the sums: zeros would be one more pass over them
            self.sums = [wide_matmul.outer(grad_CV[:, half], hidden_CD, dtype=self.wide_dtype) for half in self.halves]
            return
        for half, sum_VD in zip(self.halves, self.sums, strict=True):
            wide_matmul.add_outer(sum_VD, grad_CV[:, half], hidden_CD)

    def rounded(self) -> Tensor:
        """Return the sum [V, D] in the weight's dtype and release the accumulator."""
        sums, self.sums = self.sums, []
        if not sums:  # no tokens
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.dtype == self.wide_dtype:
            return sums[0]
        # At Llama 3's 128,256 x 4096 the float32 sum is 2.0 GiB and the bfloat16 result 1.0 GiB: as large as one half.
        # Rounded into the first half, the result never stands beside the whole sum, and the second half is freed now
        # and not after the backward pass.
        assert self.dtype.itemsize * 2 == self.wide_dtype.itemsize
        result = sums[0].view(-1).view(self.dtype)[: self.shape.numel()]
        end = 0
        for sum_VD in sums:
            # Element i of the first half lands where element i / 2 was, so it never overwrites one not yet read.
            # Within a piece the two ranges may overlap; ``to`` makes the copy that keeps them apart.
            for piece in torch.split(sum_VD.view(-1), self.PIECE):
                begin, end = end, end + len(piece)
                result[begin:end] = piece.to(self.dtype)
        return result.view(self.shape)


@dataclass(frozen=True, eq=False)
class LossTask:
    """Arguments as of ``chunked_cross_entropy``; ``weight_VD`` holds the rows of ``group.rank`` only.
    ``grad_hidden_ND`` is filled, ``head`` sums up the weight's gradient; None: that gradient is not needed.
    """

    hidden_ND: Tensor
    weight_VD: Tensor
    labels_N: Tensor
    chunk_tokens: int
    ignore_index: int
    group: TensorGroup
    grad_hidden_ND: Tensor | None
    head: HeadGradient | None

    @property
    def needs_grad(self) -> bool:
        return self.grad_hidden_ND is not None or self.head is not None

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of the loss: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.hidden_ND.dtype, torch.float32)

    def chunks(self) -> Iterator[slice]:
        """Token ranges of at most ``chunk_tokens`` tokens."""
        num_tokens = self.hidden_ND.shape[0]
        for start in range(0, num_tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_tokens))
