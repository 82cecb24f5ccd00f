"""The float32 value (master) of a weight that is stored in bfloat16: beside it, or split between the two.

A split master keeps only what the bfloat16 weight lacks. Of the float32 bits b,

    high = (b + 0x8000) >> 16          the weight: rounded to nearest, ties away from zero
    low = b - (high << 16)             the remainder: int16, since -2^15 <= low < 2^15

so that (high << 16) + low is b again, bit for bit. PyTorch casts with ties to even. That would need low = +2^15 for
half of the ties, so on those, one number in 2^17, the stored weight is its neighbour.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from titanyaml.distributed.tensor import local, place_like

#: Any NaN becomes this one: adding 0x8000 to a NaN with the largest payload would overflow to -0, and hide it.
QUIET_NAN = 0x7FC00000


def is_split(master: Tensor | None) -> TypeGuard[Tensor]:
    """Whether this is the remainder of a split master, not a float32 one."""
    return master is not None and master.dtype == torch.int16


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 value of a plain bfloat16 tensor and its int16 remainder; one new tensor."""
    bits = weight.view(torch.int16).to(torch.int32)
    bits <<= 16
    bits += remainder
    return bits.view(torch.float32)


def split_(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write float32 ``value`` into bfloat16 ``weight`` and int16 ``remainder``; all plain, of one shape."""
    bits = torch.where(value.isnan(), QUIET_NAN, value.view(torch.int32))
    high = (bits + 0x8000).bitwise_right_shift_(16)  # arithmetic: the sign stays
    weight.view(torch.int16).copy_(high)
    remainder.copy_(bits.sub_(high.bitwise_left_shift_(16)))


@torch.no_grad()
def split_master(value: Tensor, parameter: Tensor) -> Tensor:
    """Store float32 ``value`` in the bfloat16 parameter; returns the remainder, placed as the parameter is."""
    assert (value.dtype, parameter.dtype) == (torch.float32, torch.bfloat16), f"{value.dtype} into {parameter.dtype}"
    remainder = torch.empty_like(local(parameter), dtype=torch.int16)
    split_(local(value).to(remainder.device), local(parameter), remainder)
    return place_like(remainder, parameter)


@torch.no_grad()
def full_precision(parameter: Tensor, master: Tensor | None) -> Tensor:
    """The value in full precision: the parameter or its float32 master, sharing memory, or a joined copy on the host.
    Saving and loading want host memory, and on the device the copies would be all weights a second time.
    """
    if not is_split(master):
        return parameter if master is None else master
    return place_like(join(local(parameter), local(master)), parameter).cpu()


@torch.no_grad()
def store_full_precision(value: Tensor, parameter: Tensor, master: Tensor | None) -> None:
    """Take over the tensor that ``full_precision`` returned, after it was filled."""
    if is_split(master):
        split_(local(value).to(local(master).device), local(parameter), local(master))
    elif master is not None:
        parameter.copy_(master)
    else:  # a view below the DTensor was filled, which autograd did not see
        torch.autograd.graph.increment_version(local(parameter))
