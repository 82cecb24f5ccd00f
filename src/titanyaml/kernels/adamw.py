"""AdamW of one parameter in one pass over its memory: clipping, update, rounding into the stored weight.

A weight whose stored value and gradient are bfloat16 costs 28 bytes: 24 to read and write three float32 tensors, 2 to
read the gradient, 2 to write the stored weight. PyTorch's fused AdamW needs one more pass each for clipping, the
gradient's cast and the stored weight. On a 3B model optimizer and clipping took 28 ms instead of 42 a step (H200), at
4.0 TB/s: only fewer bytes would help. A split master (``master_weights``) is joined, updated and split in registers;
it needs 26 bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from titanyaml.kernels.master_weights import QUIET_NAN, is_split
from titanyaml.kernels.triton_support import ceil_div, jit, tl

BLOCK, WARPS = 2048, 8


class Factors(NamedTuple):
    """What one update multiplies by, equal for all elements; in the order of the kernel's arguments."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    decay: float  # 1 - lr * weight_decay
    step_size: float  # lr / (1 - beta1^t)
    root_scale: float  # 1 / sqrt(1 - beta2^t)

    @classmethod
    def at(cls, step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Factors:
        """Those of update ``step`` = 1, 2, ... (Loshchilov and Hutter 2019, algorithm 2)."""
        # On the host in double precision: nothing has to be read back from the device.
        step_size, root_scale = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
        return cls(beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - lr * weight_decay, step_size, root_scale)


def adamw_(
    weight: Tensor | None, master: Tensor, grad: Tensor, avg: Tensor, avg_sq: Tensor, clip: Tensor, factors: Factors
) -> None:
    """One update in place. All tensors but ``clip`` are contiguous and of one size.

    Args:
        weight: the stored weight, overwritten by the rounded master; None if the master itself is stored.
        master: float32, or the int16 remainder of a bfloat16 weight. avg, avg_sq: both moments, float32.
        grad: any float dtype. clip: its 0-dim float32 factor, read on the device.
    """
    tensors = [t for t in (weight, master, grad, avg, avg_sq) if t is not None]
    assert all(t.is_contiguous() and t.numel() == master.numel() for t in tensors)
    assert avg.dtype == avg_sq.dtype == clip.dtype == torch.float32
    split = is_split(master)
    assert weight is not None and weight.dtype == torch.bfloat16 if split else master.dtype == torch.float32
    if n := master.numel():
        stored = master if weight is None else weight  # a kernel takes no None; STORED says whether it is written
        options = {"STORED": weight is not None, "SPLIT": split, "QUIET_NAN": QUIET_NAN, "BLOCK": BLOCK}
        pointers = stored, master, grad, avg, avg_sq, clip
        adamw_kernel[(ceil_div(n, BLOCK),)](*pointers, n, *factors, **options, num_warps=WARPS)


@jit
def adamw_kernel(
    weight_ptr, master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, clip_ptr, n,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, root_scale,
    STORED: tl.constexpr, SPLIT: tl.constexpr, QUIET_NAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    # the factor is applied in float32: multiplying bfloat16 gradients beforehand would round them once more
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * tl.load(clip_ptr)
    exp_avg = beta1 * tl.load(exp_avg_ptr + offsets, mask=inside, other=0.0) + one_minus_beta1 * grad
    exp_avg_sq = beta2 * tl.load(exp_avg_sq_ptr + offsets, mask=inside, other=0.0) + one_minus_beta2 * grad * grad
    if SPLIT:  # as master_weights.join
        high = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(master_ptr + offsets, mask=inside, other=0).to(tl.int32)
        master = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        master = tl.load(master_ptr + offsets, mask=inside, other=0.0)
    master = master * decay
    master -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root_scale + eps)
    tl.store(exp_avg_ptr + offsets, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=inside)
    if SPLIT:  # as master_weights.split_
        bits = tl.where(master == master, master.to(tl.int32, bitcast=True), QUIET_NAN)
        high = (bits + 0x8000) >> 16
        tl.store(weight_ptr + offsets, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(master_ptr + offsets, (bits - (high << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(master_ptr + offsets, master, mask=inside)
    if STORED and not SPLIT:
        tl.store(weight_ptr + offsets, master.to(weight_ptr.dtype.element_ty), mask=inside)
