"""Small talk between ranks: flags, float64 sums and objects. One rank alone talks to itself.

Everything travels in host memory through gloo, which no GPU stream has to wait for and which keeps float64 exact.
All ranks of the group must call, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from titanyaml.distributed.env import Env

T = TypeVar("T")


def broadcast_object(obj: T, env: Env) -> T:
    """Rank 0's object (picklable), on every rank."""
    if env.world_size == 1:
        return obj
    box = [obj if env.is_main else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_objects(obj: T, env: Env) -> list[T]:
    """Every rank's object (picklable) in rank order, on every rank."""
    if env.world_size == 1:
        return [obj]
    boxes: list[T | None] = [None] * env.world_size
    dist.all_gather_object(boxes, obj)
    return boxes


def agree_any(flag: bool, env: Env) -> bool:
    """Whether any rank's flag is set; the same answer everywhere, so that all ranks turn off together."""
    return sum_scalars([float(flag)], env)[0] > 0


def sum_scalars(values: Sequence[float], env: Env, *, group: dist.ProcessGroup | None = None) -> list[float]:
    """Sums over ranks in float64 of equally many values from each; bit-equal on every rank.

    Args:
        group: the ranks that add up; None: all.
    """
    if env.world_size == 1:
        return [float(value) for value in values]
    total = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.tolist()
