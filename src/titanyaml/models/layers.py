"""Norm, linear layer, feed-forward and output projection.

Shapes: B batch, S sequence, D model width, F feed-forward width, V vocabulary. A suffix names the logical dimension,
also where the tensor holds a shard.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, angles and losses: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, of size ``width`` (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        # It computes in float32 for narrower inputs, rounds once, and saves only the input and one number per row for
        # the backward pass: written out in operators, float32 copies of the residual stream would be saved.
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Linear(nn.Linear):
    """x @ weight^T + bias, computed by ``product(x, weight, bias)``."""

    # Low-precision plugins replace ``product`` and not the layer: classes and parameter names stay, and tensor
    # parallelism may change the class. It is called with plain tensors, whole weights or a rank's shards, and may have
    # a method ``operand(x)`` that prepares the input of several layers, see ``shared``.
    product: Callable[..., Tensor] = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def shared(x: Tensor, *layers: Linear) -> Any:
    """``x`` as the input of several layers; where they share a product with ``operand``, what that makes of ``x``."""
    # so an input of several float8 layers is cast once
    product = layers[0].product
    prepare = getattr(product, "operand", None)
    return x if prepare is None or any(layer.product is not product for layer in layers) else prepare(x)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * (w3 x)) with gate w1, up w3 and down w2 (Shazeer 2020, GLU Variants)."""

    def __init__(self, dim: int, *, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim, bias=False)
        self.w2 = Linear(ffn_dim, dim, bias=False)
        self.w3 = Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x = shared(x_BSD, self.w1, self.w3)
        out_BSD: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out_BSD


class OutputProjection(nn.Module):
    """Holds the head's weight [V, D]."""

    # Not an ``nn.Linear``: the decoder hands the weight itself to the loss, which never forms all logits. A plugin that
    # replaces linear layers would have no effect here, so it must not find one.

    def __init__(self, dim: int, *, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def extra_repr(self) -> str:
        return "{1}, vocab_size={0}".format(*self.weight.shape)
