"""Numbers in fewer bits: bfloat16 and blocks of 8-bit codes, rounded at random so that the mean is kept.

Rounded to nearest, a moment that changes by less than half a step of its code never changes. Rounded up with a
probability equal to the part that is cut off, it is right on average. The random bits are a hash of (seed, place):
equal on every machine and device, compiled or not, and without a generator whose state a checkpoint would have to hold.

Shapes: [n, b], n blocks of b neighbouring numbers; what belongs to a block is [n, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
OCTAVES = 32.0  # a block of positive numbers is coded down to 2^-32 of its largest
STEPS = 254  # between the smallest and the largest of a block: codes 1 .. 255; 0 is zero
_MASK = 0xFFFFFFFF


def random_bits(like: Tensor, seed: Tensor) -> Tensor:
    """32 random bits for each element of ``like``, as int64.

    Args:
        seed: 0-dim int64 in [0, 2**32).
    """
    bits = (torch.arange(like.numel(), device=like.device) + seed) & _MASK
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):  # "lowbias32" of C. Wellons, hash-prospector (2018)
        bits = ((bits ^ (bits >> shift)) * factor) & _MASK
    return (bits ^ (bits >> 16)).view(like.shape)


def to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 by 16 random bits: add them below the bits that stay, and cut."""
    return _cut(x, bits, drop=16).to(torch.bfloat16)


def encode_signed(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 to e4m3 (as uint8) with one factor a block.

    Args:
        bits: 20 random bits an element.

    Returns:
        Codes [n, b] and factors [n, 1] with x = code * factor; steps are 1/8 to 1/16 of the value, down to
        2^-15 of the block's largest.
    """
    factor = x.abs().amax(-1, keepdim=True) / E4M3_MAX
    scaled = (x / factor.where(factor > 0, 1.0)).clamp(-E4M3_MAX, E4M3_MAX)
    return _cut(scaled, bits, drop=20).to(torch.float8_e4m3fn).view(torch.uint8), factor


def decode_signed(codes: Tensor, factor: Tensor) -> Tensor:
    """What ``encode_signed`` was given, as float32."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * factor


def encode_positive(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 >= 0 to codes evenly spaced in the logarithm between a block's smallest and largest positive number.

    e4m3 would be too coarse where little of each step's value is new: roundings add up over 1 / (1 - beta2) steps.

    Args:
        bits: 12 random bits an element.

    Returns:
        Codes [n, b] (uint8), smallest and largest [n, 1]. What is below 2^-32 of the largest becomes the
        smallest that is coded, never zero: an update divides by its root.
    """
    high = x.amax(-1, keepdim=True)
    low = x.where(x > 0, high).amin(-1, keepdim=True).maximum(high * 2**-OCTAVES)
    step = _log_step(low, high)
    safe = low.where(low > 0, 1.0)
    # the quotient is clamped first: log2 of 0 is -inf; a block of equal numbers has no step
    place = ((x / safe).clamp(min=1.0).log2() / step.where(step > 0, 1.0)).clamp(max=STEPS)
    below = place.floor()
    lower = safe * torch.exp2(below * step)
    share = (x - lower) / (lower * (torch.exp2(step) - 1)).where(step > 0, 1.0)
    up = (bits + 0.5) / 2**12 < share
    codes = (below + up + 1).clamp(max=STEPS + 1).where(x > 0, 0.0)
    return codes.to(torch.uint8), low, high


def decode_positive(codes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What ``encode_positive`` was given, as float32."""
    value = low * torch.exp2((codes.to(torch.float32) - 1) * _log_step(low, high))
    return value.where(codes > 0, 0.0)


def _log_step(low: Tensor, high: Tensor) -> Tensor:
    """Octaves between two codes."""
    return (high / low.where(low > 0, 1.0)).clamp(min=1.0).log2() / STEPS


def _cut(x: Tensor, bits: Tensor, *, drop: int) -> Tensor:
    """Cut ``drop`` bits of a float32's mantissa after adding as many random ones."""
    raised = x.contiguous().view(torch.int32) + bits.to(torch.int32)
    return (raised & -(1 << drop)).view(torch.float32)
