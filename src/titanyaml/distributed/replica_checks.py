"""Do ranks that must hold the same really hold the same? Asked once, before the first step.

A replica that differs in one bit trains on without an error, and so do data ranks that draw the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanyaml.distributed import comm, rng
from titanyaml.distributed.env import Env
from titanyaml.distributed.tensor import local
from titanyaml.errors import TitanError

_CHUNK = 2**22  # elements: the sum is taken over int64 copies of so many
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """A number that changes with any bit of the tensor and with the order of its elements."""
    flat = tensor.detach().reshape(-1)
    flat = flat.view(_BITS[flat.element_size()]) if flat.numel() else flat.to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _CHUNK):
        bits = flat[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + len(bits), device=flat.device)
        # odd factors that differ from place to place; int64 wraps, which loses nothing here
        total += (bits * (2 * place + 1) + (bits ^ place) * 0x9E3779B97F4A7C1).sum()
    return int(total)


def check_replicas_match(named: Iterable[tuple[str, Tensor]], env: Env) -> None:
    """Compare every tensor, or every shard of a DTensor, with its copies on other ranks, bit for bit.

    Args:
        named: weights, buffers and optimizer state by name; the same names on all ranks that hold them.

    Raises:
        TitanError: copies differ; it names the first tensors and ranks.
    """
    if env.world_size == 1:
        return
    mine = {(name, _part(tensor)): checksum(local(tensor)) for name, tensor in named}
    ranks = comm.gather_objects(mine, env)
    first = {key: (rank, value) for rank in reversed(range(len(ranks))) for key, value in ranks[rank].items()}
    different = {
        name: (first[name, part][0], rank)
        for rank, sums in enumerate(ranks)
        for (name, part), value in sums.items()
        if value != first[name, part][1]
    }
    if different:
        name, (one, other) = next(iter(different.items()))
        more = f" and {len(different) - 1} more tensors" if len(different) > 1 else ""
        raise TitanError(
            f"rank {other} holds another {name} than rank {one}{more}, although they are copies of one",
            key="pipeline.plugins",
            hint="a plugin, or the installed software, differs between ranks",
        )


def check_random_streams(seed: int, data_rank: int, env: Env) -> None:
    """Data ranks draw different random numbers, ranks that share data the same.

    Raises:
        TitanError: they do not.
    """
    draw = torch.randint(2**62, (), generator=rng.generator(seed, "step", 0, data_rank)).item()
    ranks = comm.gather_objects((data_rank, draw), env)
    if len({data for data, _ in ranks}) != len(set(ranks)) or len({number for _, number in ranks}) != len(set(ranks)):
        raise TitanError(f"random streams do not follow the data ranks: {ranks}", key="run.seed")


def _part(tensor: Tensor) -> tuple[int, ...]:
    """Which shard is here: the coordinates along the axes that shard."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return tuple(at for at, p in zip(coordinates, tensor.placements, strict=True) if not p.is_replicate())
