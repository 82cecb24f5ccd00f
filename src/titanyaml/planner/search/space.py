"""What a search tries: meshes, and for each of them what else is chosen, as values of keys.

A cell is everything but recomputation and float8 kernels. Those two are tried coarsely for every cell, then finely
where the cell can be among the fastest (``fastest.py``).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.config import degrees, world
from titanyaml.config.schema import Config
from titanyaml.config.schema.plugins import FLOAT8

#: Values of keys, by dotted key.
Values = dict[str, Any]
#: Keys that are chosen for each candidate, beside its degrees; all others stay as the command has them.
CHOSEN_KEYS = (
    "launch.nproc", "train.local_batch", "train.global_batch", "ac.mode", "ac.keep_products", "quant.recipe",
    "quant.fsdp_float8_all_gather", "quant.product", "optim.master", "parallel.pp_schedule", "compile.async_tp",
)  # fmt: skip
#: Longest axes that are tried unasked; tp stays within a host.
LONGEST_AXES = {"cp": 8, "pp": 16}


@dataclass(frozen=True)
class Space:
    """What is tried. None: all that the configuration and the device allow."""

    meshes: tuple[dict[str, int], ...] | None = None  # degrees; None: every product of divisors
    axes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # the only degrees of an axis
    # selective_layer has a period, and is tried among the fine steps unless it is asked for
    ac: tuple[str, ...] = ("none", "memory_budget", "selective_layer", "selective_op", "full")
    quant: tuple[str, ...] = ("none", "float8_tensorwise", "float8_rowwise")
    gather: tuple[bool, ...] | None = None  # whether FSDP gathers float8
    product: tuple[str, ...] | None = None  # float8 GEMM kernels; None: as configured, and our own
    master: tuple[str, ...] | None = None  # None: as configured, and split ones with our own kernels
    keep_products: tuple[float, ...] | None = None  # None: as configured, and the largest share that fits
    local_batch: tuple[int, ...] | None = None  # None: every divisor of a data rank's sequences
    schedule: tuple[str, ...] = ("1F1B", "Interleaved1F1B")
    async_tp: tuple[bool, ...] = (False, True)
    typed: frozenset[str] = frozenset()  # keys that the user gave: a candidate that does not read one is refused


def cells(config: Config, space: Space) -> Iterator[Values]:
    """Every mesh with every batch, recipe, pipeline schedule, and async TP on and off."""
    for mesh in space.meshes or _with_experts(config, _meshes(config, space), space):
        data_degree = mesh["dp_replicate"] * mesh["dp_shard"]
        num_ranks = math.prod(mesh[axis] for axis in degrees.MESH_AXES)
        global_batch = config.train.global_batch or config.train.local_batch * num_ranks
        if global_batch % data_degree:
            continue
        async_tp = space.async_tp if mesh["tp"] > 1 and config.compile.mode != "none" else (False,)
        schedules = space.schedule if mesh["pp"] > 1 else (config.parallel.pp_schedule,)
        local_batches = space.local_batch or divisors(global_batch // data_degree)
        mesh_values: Values = {"launch.nproc": None, **{f"parallel.{axis}": degree for axis, degree in mesh.items()}}
        for local_batch, (recipe, gather), schedule, is_async in itertools.product(
            local_batches, _recipes(config, space, mesh), schedules, async_tp
        ):
            yield mesh_values | {
                "train.local_batch": local_batch,
                "train.global_batch": global_batch,
                "quant.recipe": recipe,
                "quant.fsdp_float8_all_gather": gather,
                "compile.async_tp": is_async,
                "parallel.pp_schedule": schedule,
            }


def typed_kernels(space: Space, recipe: str) -> list[Values]:
    """Float8 GEMM kernels and formats of masters as typed, else as configured (no values)."""
    masters = [{} if space.master is None else {"optim.master": master} for master in space.master or ("",)]
    if recipe not in FLOAT8 or space.product is None:
        return masters
    return [{"quant.product": product, **master} for product in space.product for master in masters]


def own_kernels(config: Config, space: Space, recipe: str) -> list[Values]:
    """Our own float8 GEMM kernels, tried unasked beside ``typed_kernels`` where Triton runs."""
    can_run = recipe in FLOAT8 and not config.quant.emulate and config.kernels.name != "torch"
    if not can_run or (space.product is not None and "own" not in space.product):
        return []
    configured = {"quant.product": config.quant.product, "optim.master": config.optim.master}
    tried_already = [configured | values for values in typed_kernels(space, recipe)]
    # split masters too: they make the room that the inputs take which own kernels keep
    masters = space.master or tuple(dict.fromkeys((config.optim.master, "split")))
    own = [{"quant.product": "own", "optim.master": master} for master in masters]
    return [values for values in own if values not in tried_already]


def usual_modes(space: Space) -> list[Values]:
    """Ways to recompute that every cell is tried with, the least first; of modes with steps, the configured one."""
    modes: list[Values] = []
    asks_for_layers = space.ac != Space.ac or "ac.every" in space.typed
    for mode in space.ac:
        if mode == "selective_op" and space.keep_products:
            modes += [{"ac.mode": mode, "ac.keep_products": share} for share in space.keep_products]
        elif mode != "selective_layer" or asks_for_layers:
            modes.append({"ac.mode": mode})
    return modes


def _recipes(config: Config, space: Space, mesh: dict[str, int]) -> list[tuple[str, bool]]:
    """(recipe, whether FSDP gathers float8); without a rate for float8 a device cannot be planned with it."""
    recipes = []
    for recipe in space.quant:
        if recipe in ("float8_tensorwise", "float8_rowwise") and config.hardware.gemm_fp8_tflops is None:
            continue
        can_gather = recipe == "float8_tensorwise" and mesh["dp_shard"] * mesh["cp"] > 1
        gathers = (space.gather or (False, True)) if can_gather else (False,)
        recipes += [(recipe, gather) for gather in gathers]
    return recipes


def _meshes(config: Config, space: Space) -> Iterator[dict[str, int]]:
    """Degrees whose product is the number of ranks: tp within a host, replicas of whole hosts; or as given."""
    world_size = world.count_ranks(config)
    assert world_size is not None, "a search over meshes knows its number of ranks"
    axes, gpus_per_host = space.axes, config.cluster.gpus_per_host

    def sizes(axis: str, number: int, longest: int) -> list[int]:
        return [size for size in divisors(number) if (size in axes[axis] if axis in axes else size <= longest)]

    for tp in sizes("tp", world_size, gpus_per_host):
        for cp in sizes("cp", world_size // tp, LONGEST_AXES["cp"]):
            for pp in sizes("pp", world_size // tp // cp, LONGEST_AXES["pp"]):
                data_degree = world_size // tp // cp // pp
                for replicas in sizes("dp_replicate", data_degree, data_degree):
                    shards = data_degree // replicas
                    if "dp_shard" in axes and shards not in axes["dp_shard"]:
                        continue
                    # shards over a part of a host are larger, and have no faster links than over all of it
                    splits_host = replicas > 1 and shards * tp * cp < gpus_per_host
                    if not splits_host or "dp_replicate" in axes or "dp_shard" in axes:
                        yield {"dp_replicate": replicas, "dp_shard": shards, "cp": cp, "tp": tp, "pp": pp}


def _with_experts(config: Config, meshes: Iterator[dict[str, int]], space: Space) -> Iterator[dict[str, int]]:
    """Each mesh with every degree over which its experts can be spread; 1 where there are none."""
    degrees_of_ep = divisors(config.model.moe.num_experts) or [1]
    expert_degrees = [size for size in degrees_of_ep if size in space.axes.get("ep", degrees_of_ep)]
    for mesh in meshes:
        for ep in expert_degrees:
            if mesh["dp_shard"] * mesh["cp"] * mesh["tp"] % ep == 0:
                yield mesh | {"ep": ep}


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def mesh_name(mesh: dict[str, int]) -> str:
    """What is typed after ``parallel=``."""
    replicas, shards = mesh["dp_replicate"], mesh["dp_shard"]
    if replicas > 1 and shards > 1:
        parts = [f"hsdp{replicas}x{shards}"]
    else:
        parts = [f"{name}{size}" for name, size in (("ddp", replicas), ("fsdp", shards)) if size > 1]
    parts += [f"{axis}{mesh[axis]}" for axis in ("tp", "cp", "pp", "ep") if mesh[axis] > 1]
    return "_".join(parts) or "single"
