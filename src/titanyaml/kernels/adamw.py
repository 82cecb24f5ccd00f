"""AdamW of one parameter in one pass over its memory: gradient, master, moments and the stored weight.

28 bytes a weight where weight and gradient are bfloat16: 24 to read and write three float32 tensors, 2 to read the
gradient, 2 to write the stored weight. Clipping, a cast of the gradient and the publication of the master would each be
one more pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from titanyaml.kernels.jit import jit, tl

BLOCK, WARPS = 2048, 8


@dataclass(frozen=True)
class Factors:
    """What one update multiplies by, the same for every element.

    ``decay`` = 1 - lr * weight_decay; ``step_size`` = lr / (1 - beta1^t); ``root_scale`` = 1 / sqrt(1 - beta2^t).
    """

    beta1: float
    beta2: float
    eps: float
    decay: float
    step_size: float
    root_scale: float

    @classmethod
    def at(cls, step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Factors:
        """Those of update ``step`` = 1, 2, ... (Loshchilov and Hutter 2019, algorithm 2)."""
        return cls(beta1, beta2, eps, 1 - lr * weight_decay, lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step))


def adamw_(
    weight: Tensor | None, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, clip: Tensor,
    factors: Factors,
) -> None:
    """One update in place.

    Args:
        weight: the stored weight, overwritten by the rounded master; None where the master is what is stored.
        master, exp_avg, exp_avg_sq: float32. grad: any float dtype. All contiguous and of one size.
        clip: 0-dim float32 factor on the gradient, read on the device.
    """
    tensors = [t for t in (weight, master, grad, exp_avg, exp_avg_sq) if t is not None]
    assert all(t.is_contiguous() and t.numel() == master.numel() for t in tensors)
    assert master.dtype == exp_avg.dtype == exp_avg_sq.dtype == clip.dtype == torch.float32
    if n := master.numel():
        adamw_kernel[(-(-n // BLOCK),)](
            master if weight is None else weight, master, grad, exp_avg, exp_avg_sq, clip, n,
            factors.beta1, 1 - factors.beta1, factors.beta2, 1 - factors.beta2, factors.eps, factors.decay,
            factors.step_size, factors.root_scale, STORED=weight is not None, BLOCK=BLOCK, num_warps=WARPS,
        )


def reference_(
    weight: Tensor | None, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, clip: Tensor,
    factors: Factors,
) -> None:
    """``adamw_`` in plain PyTorch."""
    grad = grad.float() * clip
    exp_avg.mul_(factors.beta1).add_(grad, alpha=1 - factors.beta1)
    exp_avg_sq.mul_(factors.beta2).addcmul_(grad, grad, value=1 - factors.beta2)
    denominator = exp_avg_sq.sqrt() * factors.root_scale + factors.eps
    master.mul_(factors.decay).addcdiv_(exp_avg, denominator, value=-factors.step_size)
    if weight is not None:
        weight.copy_(master)


@jit
def adamw_kernel(
    weight_ptr, master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, clip_ptr, n,
    beta1, rest1, beta2, rest2, eps, decay, step_size, root_scale, STORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * tl.load(clip_ptr)
    exp_avg = beta1 * tl.load(exp_avg_ptr + place, mask=inside, other=0.0) + rest1 * grad
    exp_avg_sq = beta2 * tl.load(exp_avg_sq_ptr + place, mask=inside, other=0.0) + rest2 * grad * grad
    master = tl.load(master_ptr + place, mask=inside, other=0.0) * decay
    master -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root_scale + eps)
    tl.store(exp_avg_ptr + place, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + place, exp_avg_sq, mask=inside)
    tl.store(master_ptr + place, master, mask=inside)
    if STORED:
        tl.store(weight_ptr + place, master.to(weight_ptr.dtype.element_ty), mask=inside)
