"""Norm, feed-forward and output projection.

Shapes: B batch, S sequence, D model width, F feed-forward width, V vocabulary. A suffix names the logical dimension,
also where the tensor holds a shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums, angles and losses are formed: float32, or float64 under float64. Never narrower."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    ``F.rms_norm`` forms mean, root and product in float32 for narrower inputs and in float64 for float64, rounds once,
    and keeps only its input and one number a row for the backward pass.

    Args:
        width: size of the last dimension. eps: added to the mean square.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Linear(nn.Linear):
    """x @ weight^T + bias.

    ``product(x, weight, bias)`` is how: the one place to put in another way to multiply. It is called with plain
    tensors, the whole weight or a rank's shard of it, and knows nothing of meshes. Where it has a method
    ``operand(x)``, ``shared`` calls that, and it is called with what came back in place of ``x``.
    """

    product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def shared(x: Tensor, *layers: Linear) -> Any:
    """``x`` as input of several layers: what their product makes of it first, a cast, is made once.

    Returns:
        ``x``, or where all have the same product and it has a method ``operand``, the result of that.
    """
    product = layers[0].product
    prepare = getattr(product, "operand", None)
    return x if prepare is None or any(layer.product is not product for layer in layers) else prepare(x)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * (w3 x)), w1 the gate, w3 up, w2 down."""

    def __init__(self, dim: int, *, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim, bias=False)
        self.w2 = Linear(ffn_dim, dim, bias=False)
        self.w3 = Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x = shared(x_BSD, self.w1, self.w3)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OutputProjection(nn.Module):
    """Holds the head's weight [V, D].

    Not an ``nn.Linear``: the decoder hands the weight itself to the loss, which never forms all logits. What swaps or
    wraps linear layers would have no effect on it, and so does not find it.
    """

    def __init__(self, dim: int, *, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def extra_repr(self) -> str:
        return "{1}, vocab_size={0}".format(*self.weight.shape)
