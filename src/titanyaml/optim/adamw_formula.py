"""AdamW's update in plain tensor operators, for graphs of torch.compile.

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2        weight *= 1 - lr * weight_decay
    weight -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Loshchilov and Hutter 2019, algorithm 2, with the bias corrections moved to scalars as in PyTorch.
"""

import math

import torch
from torch import Tensor

from titanyaml.kernels.adamw import Factors


def factor_tensors(factors: Factors, *, step: int, like: Tensor) -> tuple[Tensor, ...]:
    """The scalars of update ``step`` as 0-dim tensors in ``like``'s dtype, on its device."""
    # Tensors, since a graph would hold Python numbers as constants and be compiled anew in every step. The bias
    # corrections are computed in float64: in float32, 1 - 0.999^t loses three of seven digits in the first steps.
    # ``root_scale`` is not used: multiplying by a reciprocal rounds differently from torch's division by the root.
    bias_correction2_sqrt = math.sqrt(1 - factors.beta2**step)
    numbers = [factors.beta1, factors.beta2, factors.eps, factors.decay, factors.step_size, bias_correction2_sqrt]
    return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True).unbind()


def adamw(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, factors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Update ``weight`` in place and return the new moments, in the dtype of the inputs (float32 or float64)."""
    beta1, beta2, eps, decay, step_size, bias_correction2_sqrt = factors
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * grad * grad
    weight.mul_(decay).sub_(step_size * exp_avg / (exp_avg_sq.sqrt() / bias_correction2_sqrt + eps))
    return exp_avg, exp_avg_sq
