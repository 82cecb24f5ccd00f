"""Collectives on host values: float64 sums and Python objects. A rank that runs alone talks to itself.

Everything travels in host memory through gloo: no GPU stream has to wait, and float64 stays exact. All ranks of the
group must call, in the same order.
"""

from collections.abc import Sequence
from typing import TypeVar, cast

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
    return cast(T, box[0])


def gather_objects(obj: T, env: Env) -> list[T]:
    """Every rank's object (picklable) in rank order, on every rank."""
    if env.world_size == 1:
        return [obj]
    objects: list[T | None] = [None] * env.world_size
    dist.all_gather_object(objects, obj)
    return cast(list[T], objects)


def sum_scalars(values: Sequence[float], env: Env, *, group: dist.ProcessGroup | None = None) -> list[float]:
    """Sums over the ranks of ``group`` (None: all), in float64, of equally many values from each; bit-equal on all."""
    if env.world_size == 1:
        return [float(value) for value in values]
    total = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.tolist()
