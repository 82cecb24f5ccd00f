"""AdamW of one parameter in one pass over its memory: gradient, master, moments and the stored weight.

28 bytes a weight where weight and gradient are bfloat16: 24 to read and write three float32 tensors, 2 to read the
gradient, 2 to write the stored weight. Clipping, a cast of the gradient and the publication of the master would each be
one more pass. A split master (``kernels.master``) has no float32 tensor: it is joined, updated and split in registers,
26 bytes a weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from titanyaml.kernels.master_weights import QUIET_NAN, is_split, join, split_
from titanyaml.kernels.triton_support import jit, tl

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
    bias_correction2_sqrt: float

    @property
    def root_scale(self) -> float:
        return 1 / self.bias_correction2_sqrt

    @classmethod
    def at(cls, step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Factors:
        """Those of update ``step`` = 1, 2, ... (Loshchilov and Hutter 2019, algorithm 2)."""
        return cls(beta1, beta2, eps, 1 - lr * weight_decay, lr / (1 - beta1**step), math.sqrt(1 - beta2**step))


def adamw_(
    weight: Tensor | None,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    clip: Tensor,
    factors: Factors,
) -> None:
    """One update in place.

    Args:
        weight: the stored weight, overwritten by the rounded master; None where the master is what is stored.
        master, exp_avg, exp_avg_sq: float32; or the master is the int16 remainder of a bfloat16 weight. grad: any
            float dtype. All contiguous and of one size.
        clip: 0-dim float32 factor on the gradient, read on the device.
    """
    tensors = [t for t in (weight, master, grad, exp_avg, exp_avg_sq) if t is not None]
    assert all(t.is_contiguous() and t.numel() == master.numel() for t in tensors)
    assert exp_avg.dtype == exp_avg_sq.dtype == clip.dtype == torch.float32
    split = is_split(master)
    assert weight is not None and weight.dtype == torch.bfloat16 if split else master.dtype == torch.float32
    if n := master.numel():
        adamw_kernel[(-(-n // BLOCK),)](
            master if weight is None else weight,
            master,
            grad,
            exp_avg,
            exp_avg_sq,
            clip,
            n,
            factors.beta1,
            1 - factors.beta1,
            factors.beta2,
            1 - factors.beta2,
            factors.eps,
            factors.decay,
            factors.step_size,
            factors.root_scale,
            STORED=weight is not None,
            SPLIT=split,
            QUIET_NAN=QUIET_NAN,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def reference_(
    weight: Tensor | None,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    clip: Tensor,
    factors: Factors,
) -> None:
    """``adamw_`` in plain PyTorch."""
    grad = grad.float() * clip
    exp_avg.mul_(factors.beta1).add_(grad, alpha=1 - factors.beta1)
    exp_avg_sq.mul_(factors.beta2).addcmul_(grad, grad, value=1 - factors.beta2)
    denominator = exp_avg_sq.sqrt() * factors.root_scale + factors.eps
    value = join(weight, master) if is_split(master) else master
    value.mul_(factors.decay).addcdiv_(exp_avg, denominator, value=-factors.step_size)
    if is_split(master):
        split_(value, weight, master)
    elif weight is not None:
        weight.copy_(value)


@jit
def adamw_kernel(
    weight_ptr, master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, clip_ptr, n,
    beta1, rest1, beta2, rest2, eps, decay, step_size, root_scale,
    STORED: tl.constexpr, SPLIT: tl.constexpr, QUIET_NAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * tl.load(clip_ptr)
    exp_avg = beta1 * tl.load(exp_avg_ptr + place, mask=inside, other=0.0) + rest1 * grad
    exp_avg_sq = beta2 * tl.load(exp_avg_sq_ptr + place, mask=inside, other=0.0) + rest2 * grad * grad
    if SPLIT:
        high = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(master_ptr + place, mask=inside, other=0).to(tl.int32)
        master = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        master = tl.load(master_ptr + place, mask=inside, other=0.0)
    master = master * decay
    master -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root_scale + eps)
    tl.store(exp_avg_ptr + place, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + place, exp_avg_sq, mask=inside)
    if SPLIT:
        bits = tl.where(master == master, master.to(tl.int32, bitcast=True), QUIET_NAN)
        high = (bits + 0x8000) >> 16
        tl.store(weight_ptr + place, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(master_ptr + place, (bits - (high << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(master_ptr + place, master, mask=inside)
    if STORED and not SPLIT:
        tl.store(weight_ptr + place, master.to(weight_ptr.dtype.element_ty), mask=inside)
