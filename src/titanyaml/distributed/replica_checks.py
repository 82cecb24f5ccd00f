"""Checks, before the first step, that ranks which must hold the same values do.

A replica that differs in one bit trains on without an error, and so do data ranks that draw equal random numbers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanyaml.distributed import comm, rng
from titanyaml.distributed.env import Env
from titanyaml.distributed.tensor import local
from titanyaml.errors import TitanError

_CHUNK = 2**22  # elements: the sum makes int64 copies, 32 MiB each, of a chunk and not of a whole weight
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """A number that changes with any bit of the tensor and with the order of its elements."""
    flat = tensor.detach().reshape(-1)
    flat = flat.view(_INT_OF_SIZE[flat.element_size()]) if flat.numel() else flat.to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _CHUNK):
        bits = flat[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(start, start + len(bits), device=flat.device)
        # An odd factor that differs for each index. Odd numbers are invertible modulo 2^64, so that int64 may wrap
        # without losing a bit. The second term mixes value and index otherwise, against sums that collide by chance.
        total += (bits * (2 * index + 1) + (bits ^ index) * 0x9E3779B97F4A7C1).sum()
    return int(total)


def check_replicas_match(named_tensors: Iterable[tuple[str, Tensor]], env: Env) -> None:
    """Raise a TitanError unless every tensor, or shard of a DTensor, equals its copies on other ranks, bit for bit."""
    if env.world_size == 1:
        return
    sums = {(name, _shard_of(tensor)): checksum(local(tensor)) for name, tensor in named_tensors}
    first: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}  # lowest rank that holds a shard, and its checksum
    different: dict[str, tuple[int, int]] = {}
    for rank, rank_sums in enumerate(comm.gather_objects(sums, env)):
        for key, value in rank_sums.items():
            first_rank, expected = first.setdefault(key, (rank, value))
            if value != expected:
                different[key[0]] = first_rank, rank
    if different:
        name, (first_rank, other_rank) = next(iter(different.items()))
        more = f" and {len(different) - 1} more tensors" if len(different) > 1 else ""
        raise TitanError(
            f"rank {other_rank} holds another {name} than rank {first_rank}{more}, although they are copies of one",
            key="pipeline.plugins",
            hint="a plugin, or the installed software, differs between ranks",
        )


def check_random_streams(seed: int, data_rank: int, env: Env) -> None:
    """Raise a TitanError unless data ranks draw different random numbers, and ranks that share data the same."""
    draw = torch.randint(2**62, (), generator=rng.generator(seed, "step", 0, data_rank)).item()
    pairs = comm.gather_objects((data_rank, draw), env)
    # one-to-one: as many data ranks and as many draws as there are pairs of them
    if not len({data for data, _ in pairs}) == len({number for _, number in pairs}) == len(set(pairs)):
        raise TitanError(f"random streams do not follow the data ranks: {pairs}", key="run.seed")


def _shard_of(tensor: Tensor) -> tuple[int, ...]:
    """The shard on this rank: the mesh coordinates along the axes that shard. Copies have equal ones."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    axes = zip(coordinates, tensor.placements, strict=True)
    return tuple(coordinate for coordinate, placement in axes if not placement.is_replicate())
