"""Times of a collective and its matmuls, one after the other and fused, measured on the tp ranks that will run them.

A fused operator cuts a matmul into one slice for each rank. Whether the overlap gains more than the smaller matmuls
lose depends on shape, link and device. So each place is timed both ways, on all ranks at once, before anything is
compiled. The slowest rank's time counts, every rank sees the same numbers, and all decide alike. A JSON file keeps the
times for the next run.
"""

import json
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.distributed.float8_reduce_scatter import float8_matmul_exchange
from titanyaml.distributed.graph_matmuls import CollectivePlace
from titanyaml.distributed.tensor import TensorGroup, gather_sequence, scatter_sum
from titanyaml.rundir import atomic_write

#: Calls between two readings of the clock, and number of readings, of which the median counts.
CALLS, READINGS = 10, 5
#: Share of the time that a fused operator must save: repeated measurements differ by about as much.
MARGIN = 0.02

#: Milliseconds of a call.
Clock = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class PlaceTimes:
    """Milliseconds of a place: collective and matmuls one after the other, and fused."""

    apart: float
    fused: float

    @property
    def wins(self) -> bool:
        """Whether fusing saves more than the margin."""
        return self.fused < self.apart * (1 - MARGIN)


def measure(
    places: list[CollectivePlace],
    group: TensorGroup,
    *,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    cache: Path | None,
    clock: Clock | None = None,
) -> dict[CollectivePlace, PlaceTimes]:
    """Times of each place: from the JSON file ``cache`` if it has all of them, else measured by ``clock``.
    All ranks of the job must call. ``batch``: sequences that the tokens belong to.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # all that changes a time, except the place
    sizes = f"tp {group.size}; {batch} sequences; {dist.get_world_size()} ranks"
    key = f"torch {torch.__version__}; {name}; {dtype}; {sizes}"
    times = _read(cache, key)
    if not all(str(collective) in times for collective in places):
        clock = clock or event_clock
        # one place after the other, so that the tensors of only one exist
        pairs = (calls(collective, group, batch=batch, dtype=dtype, device=device) for collective in places)
        slowest = torch.tensor([[clock(call) for call in pair] for pair in pairs], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times |= {str(collective): pair for collective, pair in zip(places, slowest.tolist(), strict=True)}
        _write(cache, key, times)
    return {collective: PlaceTimes(*times[str(collective)]) for collective in places}


def calls(
    place: CollectivePlace, group: TensorGroup, *, batch: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The place computed apart and fused, on random tensors. A sum of float8 matmuls is timed as one wide matmul."""
    from titanyaml.distributed import compat_async_tp  # Inductor takes seconds to import

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    is_gather = place.kind == "all_gather"
    length = place.tokens // batch // (group.size if is_gather else 1)
    x_BSK = draw(batch, length, place.inner)
    weights_KN = [draw(width, place.inner).t() for width in place.widths]
    if place.float8:
        operands = (x_BSK.flatten(0, 1), weights_KN[0])
        x_MK, w_KN = (operand.to(torch.float8_e4m3fn) for operand in operands)
        scale = torch.ones((), device=device)

        def float8_apart() -> Tensor:
            product_MN = compat.scaled_mm(x_MK, w_KN, scale, scale, dtype=dtype)
            return scatter_sum(product_MN.view(batch, length, -1), group)

        def float8_fused() -> Tensor:
            sides = [x_MK], [w_KN], [scale], [scale]
            slices = float8_matmul_exchange(*sides, batch, True, dtype, group.size, group.name)
            # Additions are much faster than torch's sum over a dimension, slower than the sum that Inductor compiles.
            return reduce(torch.add, slices)

        return float8_apart, float8_fused

    def apart() -> list[Tensor]:
        if not is_gather:
            return [scatter_sum(x_BSK @ weights_KN[0], group)]
        gathered_BSK = gather_sequence(x_BSK, group)
        return [gathered_BSK @ weight for weight in weights_KN]

    # the memory order that torch's fused operators want: position first, then sequence
    x_by_position_BSK = x_BSK.transpose(0, 1).contiguous().transpose(0, 1)

    def fused() -> Any:
        if is_gather:
            return compat_async_tp.gather_multiply(x_by_position_BSK, weights_KN, group.name)
        return compat_async_tp.multiply_scatter(x_by_position_BSK, weights_KN[0], group.name)

    return apart, fused


def event_clock(call: Callable[[], Any]) -> float:
    """Milliseconds of one of several calls in a row on the current CUDA stream."""
    readings = []
    for _ in range(READINGS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        readings.append(start.elapsed_time(end) / CALLS)
    return statistics.median(readings[1:])  # the first reading allocates workspaces and exchanges memory handles


def _read(cache: Path | None, key: str) -> dict[str, list[float]]:
    """The times in rank 0's file, on every rank; empty if it cannot be read, so that all are measured again."""
    times: dict[str, list[float]] = {}
    if dist.get_rank() == 0 and cache is not None and cache.exists():
        with suppress(OSError, ValueError, KeyError):
            times = dict(json.loads(cache.read_text())[key])
    box = [times]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def _write(cache: Path | None, key: str, times: dict[str, list[float]]) -> None:
    if cache is None or dist.get_rank() != 0:
        return
    content: dict[str, Any] = {}
    with suppress(FileNotFoundError, ValueError):
        content = json.loads(cache.read_text())
    atomic_write(cache, json.dumps(content | {key: times}, indent=1) + "\n")
