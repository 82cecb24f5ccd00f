"""Which transfers of the tp ranks are faster fused with their matrix products: measured on the ranks that will do it.

A fused operator cuts a product into one slice a rank. Whether that hides more than it costs depends on shape, link and
device, so that each place is timed both ways, on all ranks at once, before anything is compiled. The slowest rank's
times count; every rank sees the same numbers and decides alike. They are kept in a file for the next run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.distributed.float8_reduce_scatter import float8_matmul_exchange
from titanyaml.distributed.tensor import TensorGroup, gather_sequence, scatter_sum
from titanyaml.rundir import atomic_write

#: Calls between two readings of the clock, and readings.
CALLS, READINGS = 10, 5
#: A fused operator must win by this share of the time, which is what one measurement differs from the next by.
MARGIN = 0.02

Clock = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True, order=True)
class CollectivePlace:
    """A transfer with the products next to it.

    Args:
        kind: "all_gather" before products, "reduce_scatter" behind one. tokens: of all tp ranks. inner: features that a
            rank multiplies by. widths: output features of each product on a rank, ascending. float8: what is
            multiplied.
    """

    kind: str
    tokens: int
    inner: int
    widths: tuple[int, ...]
    float8: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens}x{self.inner} to {'+'.join(map(str, self.widths))}{' float8' * self.float8}"


@dataclass(frozen=True)
class Timed:
    """Milliseconds of a place, apart and fused."""

    apart: float
    fused: float

    @property
    def wins(self) -> bool:
        """Whether it is to be fused."""
        return self.fused < self.apart * (1 - MARGIN)


def block_places(
    tokens: int, dim: int, columns: Iterable[tuple[int, ...]], rows: Iterable[int], *, float8: bool = False
) -> list[CollectivePlace]:
    """The places of a block's forward and backward.

    Args:
        columns: widths on a rank of the matrices that read one gathered tensor: (q, k, v), (gate, up). A checkpoint
            keeps some of their outputs, so that a repeated gather stands before the others alone: every choice of them.
        rows: inner features on a rank of the matrices whose outputs are summed: o, down.
        float8: these matrices are multiplied in float8: before them stand casts, so that scatters alone are places.
    """
    rows, found = list(rows), set()
    for widths in columns:
        for size in range(1, len(widths) + 1):
            found |= {CollectivePlace("all_gather", tokens, dim, tuple(sorted(some))) for some in combinations(widths, size)}
        found.add(CollectivePlace("reduce_scatter", tokens, sum(widths), (dim,)))  # of the gradients of their input
    for inner in rows:
        found.add(CollectivePlace("reduce_scatter", tokens, inner, (dim,)))
        found.add(CollectivePlace("all_gather", tokens, dim, (inner,)))  # of the gradients of their output
    if float8:
        found = {replace(place, float8=True) for place in found if place.kind == "reduce_scatter"}
    return sorted(found)


def measure(
    places: list[CollectivePlace],
    group: TensorGroup,
    *,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    cache: Path | None,
    clock: Clock | None = None,
) -> dict[CollectivePlace, Timed]:
    """Times of each place: from the file where they are all there, else measured. All ranks of the job must call.

    Args:
        batch: sequences that the tokens are of. cache: a JSON file; None: nothing is kept. clock: milliseconds of a
            call; None: the device's own events.
    """
    key = "; ".join(
        (
            f"torch {torch.__version__}",
            _device_name(device),
            str(dtype),
            f"tp {group.size}",
            f"{batch} sequences",
            f"{dist.get_world_size()} ranks",
        )
    )
    known = _read(cache, key)
    if not all(str(place) in known for place in places):
        clock = clock or events
        mine = [
            [clock(call) for call in calls(place, group, batch=batch, dtype=dtype, device=device)] for place in places
        ]
        times = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        known |= {str(place): pair for place, pair in zip(places, times.tolist(), strict=True)}
        _write(cache, key, known)
    return {place: Timed(*known[str(place)]) for place in places}


def calls(
    place: CollectivePlace, group: TensorGroup, *, batch: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A place as it is computed apart, and fused; on tensors of random numbers.

    A sum of float8 products is taken as one product of all their features.
    """
    from titanyaml.distributed import compat_async_tp  # Inductor takes seconds to import

    draw = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    gathers = place.kind == "all_gather"
    length = place.tokens // batch // (group.size if gathers else 1)
    x_BSK = draw(batch, length, place.inner)
    weights = [draw(width, place.inner).t() for width in place.widths]

    def apart() -> list[Tensor]:
        if gathers:
            whole_BSK = gather_sequence(x_BSK, group)
            return [whole_BSK @ weight for weight in weights]
        return [scatter_sum(x_BSK @ weights[0], group)]

    def float8_apart() -> Tensor:
        return scatter_sum(compat.scaled_mm(*float8, dtype=dtype).view(batch, length, -1), group)

    def float8_fused() -> Tensor:
        slices = float8_matmul_exchange(*([one] for one in float8), batch, True, dtype, group.size, group.name)
        return reduce(torch.add, slices)  # much faster than a sum over a dimension, slower than the compiled one

    def fused() -> Any:
        if gathers:
            return compat_async_tp.gather_multiply(laid_out, weights, group.name)
        return compat_async_tp.multiply_scatter(laid_out, weights[0], group.name)

    if place.float8:
        one = torch.ones((), device=device)
        float8 = x_BSK.flatten(0, 1).to(torch.float8_e4m3fn), weights[0].to(torch.float8_e4m3fn), one, one
        return float8_apart, float8_fused
    laid_out = x_BSK.transpose(0, 1).contiguous().transpose(0, 1)  # by position: what the operators want
    return apart, fused


def events(call: Callable[[], Any]) -> float:
    """Milliseconds of one of several calls in a row on the current CUDA stream."""
    readings = []
    for reading in range(READINGS + 1):  # the first one warms up: workspaces, exchanged handles
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        readings += [start.elapsed_time(end) / CALLS] * (reading > 0)
    return statistics.median(readings)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(cache: Path | None, key: str) -> dict[str, list[float]]:
    """Rank 0's file, for every rank; a file that cannot be read is measured again."""
    box: list[Any] = [{}]
    if dist.get_rank() == 0 and cache is not None and cache.exists():
        try:
            box[0] = dict(json.loads(cache.read_text())[key])
        except (OSError, ValueError, KeyError):
            box[0] = {}
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def _write(cache: Path | None, key: str, known: dict[str, list[float]]) -> None:
    if cache is None or dist.get_rank() != 0:
        return
    try:
        content = json.loads(cache.read_text()) if cache.exists() else {}
    except ValueError:
        content = {}
    atomic_write(cache, json.dumps(content | {key: known}, indent=1) + "\n")
