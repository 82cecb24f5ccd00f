"""What a search tries: meshes, and of each what else is chosen, as values of keys.

A cell is everything but recomputation and who multiplies in float8: those are tried of every cell coarsely, then finely
where it can be among the fastest (``search.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.config import degrees, ranks
from titanyaml.config.schema import Config
from titanyaml.config.schema.plugins import FLOAT8

#: Values of keys, by dotted key.
Values = dict[str, Any]
#: What is chosen of each candidate, beside its degrees: no part of the rest of a command.
CHOSEN = (
    "launch.nproc",
    "train.local_batch",
    "train.global_batch",
    "ac.mode",
    "ac.keep_products",
    "quant.recipe",
    "quant.fsdp_float8_all_gather",
    "quant.product",
    "optim.master",
    "parallel.pp_schedule",
    "compile.async_tp",
)


@dataclass(frozen=True)
class Space:
    """What is tried.

    Args:
        meshes: degrees, all else 1; None: every product of divisors. axes: the only degrees of an axis.
        ac: modes; selective_layer, where it is not asked for, in steps alone.
        local_batch: None: every divisor of a data rank's sequences.
        gather: whether FSDP gathers float8; None: both where it can.
        product, master: None: as configured, and own products, with split masters too, where they can be.
        keep_products: None: as configured, and the largest share that fits.
        typed: dotted keys that the user gave; of those that are not ``CHOSEN`` none may be left unread.
    """

    meshes: tuple[dict[str, int], ...] | None = None
    axes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    ac: tuple[str, ...] = ("none", "memory_budget", "selective_layer", "selective_op", "full")
    quant: tuple[str, ...] = ("none", "float8_tensorwise", "float8_rowwise")
    gather: tuple[bool, ...] | None = None
    product: tuple[str, ...] | None = None
    master: tuple[str, ...] | None = None
    keep_products: tuple[float, ...] | None = None
    local_batch: tuple[int, ...] | None = None
    schedule: tuple[str, ...] = ("1F1B", "Interleaved1F1B")
    async_tp: tuple[bool, ...] = (False, True)
    typed: frozenset[str] = frozenset()


def cells(config: Config, space: Space) -> Iterator[Values]:
    """Every mesh with every batch, recipe, schedule and kind of transfer."""
    world = ranks.world_size(config)
    host = config.cluster.gpus_per_host
    for mesh in space.meshes or _with_experts(config, _meshes(world, host, space.axes), space):
        data, size = mesh["dp_replicate"] * mesh["dp_shard"], math.prod(mesh[axis] for axis in degrees.MESH_AXES)
        batch = config.train.global_batch or config.train.local_batch * size
        if batch % data:
            continue
        fuses = space.async_tp if mesh["tp"] > 1 and config.compile.mode != "none" else (False,)
        schedules = space.schedule if mesh["pp"] > 1 else (config.parallel.pp_schedule,)
        placed: Values = {"launch.nproc": None, **{f"parallel.{axis}": degree for axis, degree in mesh.items()}}
        for local, (recipe, gather), schedule, fused in itertools.product(
            space.local_batch or _divisors(batch // data), _recipes(config, space, mesh), schedules, fuses
        ):
            yield placed | {
                "train.local_batch": local,
                "train.global_batch": batch,
                "quant.recipe": recipe,
                "quant.fsdp_float8_all_gather": gather,
                "compile.async_tp": fused,
                "parallel.pp_schedule": schedule,
            }


def kernels(config: Config, space: Space, recipe: str) -> list[Values]:
    """Who multiplies in float8, and what masters are stored as: as typed, else as configured."""
    masters = [{} if space.master is None else {"optim.master": master} for master in space.master or ("",)]
    if recipe not in FLOAT8 or space.product is None:
        return masters
    return [{"quant.product": product, **master} for product in space.product for master in masters]


def own_kernels(config: Config, space: Space, recipe: str) -> list[Values]:
    """What is tried beside ``kernels`` unasked: our own float8 products, where there are Triton kernels, and split
    masters with them."""
    able = recipe in FLOAT8 and not config.quant.emulate and config.kernels.name != "torch"
    if not able or (space.product is not None and "own" not in space.product):
        return []
    there = {"quant.product": config.quant.product, "optim.master": config.optim.master}
    asked = [there | one for one in kernels(config, space, recipe)]
    masters = space.master or tuple(dict.fromkeys((config.optim.master, "split")))
    own = [{"quant.product": "own", "optim.master": master} for master in masters]
    return [one for one in own if one not in asked]


def modes(config: Config, space: Space) -> list[Values]:
    """Ways to recompute, the least first; of those with steps, one."""
    found: list[Values] = []
    for mode in space.ac:
        if mode == "selective_op" and space.keep_products:
            found += [{"ac.mode": mode, "ac.keep_products": share} for share in space.keep_products]
        elif mode != "selective_layer" or space.ac != Space.ac or "ac.every" in space.typed:
            found.append({"ac.mode": mode})
    return found


def _recipes(config: Config, space: Space, mesh: dict[str, int]) -> list[tuple[str, bool]]:
    found = []
    for recipe in space.quant:
        if recipe in ("float8_tensorwise", "float8_rowwise") and config.hardware.gemm_fp8_tflops is None:
            continue
        can = recipe == "float8_tensorwise" and mesh["dp_shard"] * mesh["cp"] > 1
        found += [(recipe, gather) for gather in ((space.gather or (False, True)) if can else (False,))]
    return found


def _meshes(world: int, host: int, axes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, int]]:
    """Degrees with this product: tp within a host, copies by whole hosts; or as given."""

    def sizes(axis: str, number: int, most: int) -> list[int]:
        return [size for size in _divisors(number) if (size in axes[axis] if axis in axes else size <= most)]

    for tp in sizes("tp", world, host):
        for cp in sizes("cp", world // tp, 8):
            for pp in sizes("pp", world // tp // cp, 16):
                data = world // tp // cp // pp
                for copies in sizes("dp_replicate", data, data):
                    near = copies > 1 and data // copies * tp * cp < host
                    if "dp_shard" in axes and data // copies not in axes["dp_shard"]:
                        continue
                    if not near or "dp_replicate" in axes or "dp_shard" in axes:
                        yield {"dp_replicate": copies, "dp_shard": data // copies, "cp": cp, "tp": tp, "pp": pp}


def _with_experts(config: Config, meshes: Iterator[dict[str, int]], space: Space) -> Iterator[dict[str, int]]:
    """Each mesh with every degree over which the experts of a mixture can be spread; 1 where there are none."""
    spread = _divisors(config.model.moe.num_experts) if config.model.moe.num_experts else [1]
    for mesh in meshes:
        for ep in [size for size in spread if size in space.axes.get("ep", spread)]:
            if mesh["dp_shard"] * mesh["cp"] * mesh["tp"] % ep == 0:
                yield mesh | {"ep": ep}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def name(mesh: dict[str, int]) -> str:
    """The mesh's name, as it is typed."""
    parts = []
    if mesh["dp_replicate"] > 1 and mesh["dp_shard"] > 1:
        parts.append(f"hsdp{mesh['dp_replicate']}x{mesh['dp_shard']}")
    elif mesh["dp_replicate"] > 1:
        parts.append(f"ddp{mesh['dp_replicate']}")
    elif mesh["dp_shard"] > 1:
        parts.append(f"fsdp{mesh['dp_shard']}")
    parts += [f"{axis}{mesh[axis]}" for axis in ("tp", "cp", "pp", "ep") if mesh[axis] > 1]
    return "_".join(parts) or "single"
