"""The update of AdamW for graphs of torch.compile: what changes from step to step comes in tensors.

A graph that held the numbers would be compiled anew in every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def factors(
    step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, like: Tensor
) -> tuple[Tensor, ...]:
    """beta1, beta2, eps, 1 - lr * decay, lr / (1 - beta1^t), sqrt(1 - beta2^t): 0-dim, of ``like``'s dtype and device.

    Reckoned in double precision. step: t, from 1.
    """
    numbers = [beta1, beta2, eps, 1 - lr * weight_decay, lr / (1 - beta1**step), math.sqrt(1 - beta2**step)]
    return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True).unbind()


def adamw(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, factors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Update ``weight`` in place; the new moments (Loshchilov and Hutter 2019, as torch computes it)."""
    beta1, beta2, eps, keep, rate, root = factors
    mean = mean + (1 - beta1) * (grad - mean)
    square = square * beta2 + (1 - beta2) * grad * grad
    weight.mul_(keep).sub_(rate * mean / (square.sqrt() / root + eps))
    return mean, square
