"""Inputs and gradient buffers of one call of the loss."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titanyaml.distributed.tensor import TensorGroup
from titanyaml.loss.head_gradient import HeadGradient


@dataclass(frozen=True, eq=False)
class LossTask:
    """Arguments as of ``chunked_cross_entropy``; ``weight_VD`` holds the rows of ``group.rank`` only.

    Args:
        grad_hidden_ND: buffer to fill with the gradient of the hidden states; None: not needed.
        head: accumulator of the weight's gradient; None: not needed.
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
