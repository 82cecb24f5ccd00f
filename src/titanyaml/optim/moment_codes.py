"""Low-bit codes of AdamW's moments: bfloat16, and blocks of 8-bit codes, with stochastic rounding.

Rounded to nearest, a moment that changes by less than half a step of its code never changes. Rounded up with a
probability equal to the part that is cut off, it is right on average.

Shapes: [n, b], n blocks of b neighbouring elements; block factors are [n, 1].
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
OCTAVES = 32.0  # a block of positive numbers is encoded down to 2^-32 of its largest
STEPS = 254  # steps between the codes 1 (smallest of a block) and 255 (largest); code 0 is zero
_MASK = 0xFFFFFFFF


def random_bits(like: Tensor, seed: Tensor) -> Tensor:
    """32 random bits for each element of ``like``, as int64. ``seed``: 0-dim int64 in [0, 2**32)."""
    # A hash of (seed, position): equal on every machine and device, compiled or not, and without a generator whose
    # state a checkpoint would have to hold. int64 stands for uint32, which torch lacks arithmetic for: hence the mask.
    bits = (torch.arange(like.numel(), device=like.device) + seed) & _MASK
    # "lowbias32" of C. Wellons, hash-prospector (2018)
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        bits = ((bits ^ (bits >> shift)) * factor) & _MASK
    return (bits ^ (bits >> 16)).view(like.shape)


def to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically by 16 random bits."""
    return _add_and_truncate(x, bits, drop=16).to(torch.bfloat16)


def encode_signed(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, b] in e4m3 (viewed as uint8) and factors [n, 1] of float32 x = code * factor.
    Steps are 1/8 to 1/16 of the value, down to 2^-15 of the block's largest. ``bits``: 20 random ones per element.
    """
    # the largest element of a block becomes e4m3's largest number: the whole range of the code is used
    factor = x.abs().amax(-1, keepdim=True) / E4M3_MAX
    scaled = (x / factor.where(factor > 0, 1.0)).clamp(-E4M3_MAX, E4M3_MAX)
    # 20 of float32's 23 mantissa bits go; e4m3 has three, so that the cast afterwards is exact for normal numbers
    return _add_and_truncate(scaled, bits, drop=20).to(torch.float8_e4m3fn).view(torch.uint8), factor


def decode_signed(codes: Tensor, factor: Tensor) -> Tensor:
    """Inverse of ``encode_signed``, as float32."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * factor


def encode_positive(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, b] (uint8) of float32 >= 0, and a block's smallest and largest positive number [n, 1].
    Codes are evenly spaced in log2 between the two. ``bits``: 12 random ones per element.
    """
    # e4m3 would be too coarse for the second moment: it wastes a sign bit, and little of each step's value is new, so
    # that roundings add up over 1 / (1 - beta2) steps.
    high = x.amax(-1, keepdim=True)
    # What is below 2^-32 of the largest is encoded as that, never as zero: the update divides by its root.
    low = x.where(x > 0, high).amin(-1, keepdim=True).maximum(high * 2**-OCTAVES)
    log_step = _log_step(low, high)
    safe_low = low.where(low > 0, 1.0)  # a block of zeros: any divisor, its codes become 0 below
    safe_step = log_step.where(log_step > 0, 1.0)  # a block of equal numbers has no step
    # the quotient is clamped before the logarithm: log2 of 0 is -inf
    position = ((x / safe_low).clamp(min=1.0).log2() / safe_step).clamp(max=STEPS)
    lower_code = position.floor()
    lower = safe_low * torch.exp2(lower_code * log_step)
    # The probability of the upper code is linear in x, not in log2(x): only so the decoded value is right on average.
    share = (x - lower) / (lower * (torch.exp2(log_step) - 1)).where(log_step > 0, 1.0)
    round_up = (bits + 0.5) / 2**12 < share
    codes = (lower_code + round_up + 1).clamp(max=STEPS + 1).where(x > 0, 0.0)
    return codes.to(torch.uint8), low, high


def decode_positive(codes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Inverse of ``encode_positive``, as float32."""
    value = low * torch.exp2((codes.to(torch.float32) - 1) * _log_step(low, high))
    return value.where(codes > 0, 0.0)


def _log_step(low: Tensor, high: Tensor) -> Tensor:
    """Octaves between two neighbouring codes of a block."""
    return (high / low.where(low > 0, 1.0)).clamp(min=1.0).log2() / STEPS


def _add_and_truncate(x: Tensor, bits: Tensor, *, drop: int) -> Tensor:
    """Round float32 stochastically to ``23 - drop`` mantissa bits: add ``drop`` random bits, then clear as many."""
    # a carry of the integer addition goes into the exponent: that is the next number up, as it should be
    raised = x.contiguous().view(torch.int32) + bits.to(torch.int32)
    return (raised & -(1 << drop)).view(torch.float32)
