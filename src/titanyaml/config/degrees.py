"""Degrees of the device mesh: names such as ``hsdp2x4_tp8``, the derived -1, the product."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from titanyaml.config import schema
from titanyaml.errors import ConfigError
from titanyaml.pipeline_schedule import actions
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS

#: Axes whose product is the number of ranks, outermost first; ``ep`` reuses dp_shard*cp*tp.
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
AXES = (*MESH_AXES, "ep")

#: First letters of a part of a mesh name, and the axes that it sets.
PARTS = {
    "ddp": ("dp_replicate",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard",),
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "ep": ("ep",),
}
_PART = re.compile(r"([a-z]+?)([1-9]\d*)(?:x([1-9]\d*))?")


@dataclass(frozen=True)
class Degrees:
    """Resolved degrees; none is -1. ``ep`` is no axis of its own: it reuses dp_shard*cp*tp."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def shard_degree(self) -> int:
        """Ranks over which FSDP shards: those that hold different tokens of a sequence or different sequences."""
        return self.dp_shard * self.cp

    @property
    def token_degree(self) -> int:
        """Ranks that hold different tokens: their gradients are summed."""
        return self.dp_replicate * self.shard_degree

    @property
    def data_degree(self) -> int:
        """Number of different data ranks: how often the batch is split."""
        return self.dp_replicate * self.dp_shard


def parse_mesh_name(name: str) -> dict[str, int] | None:
    """Degrees that a mesh name stands for; None where it is not one.

    Parts ``ddpN hsdpRxS fsdpN tpN cpN ppN epN`` joined by ``_`` in any order, each axis once. A name with ``epN`` and
    no data-parallel part gets ``dp_shard = N``, so that EP divides dp_shard*cp*tp.
    """
    degrees: dict[str, int] = {}
    for part in name.split("_"):
        match = _PART.fullmatch(part)
        axes = PARTS.get(match[1], ()) if match else ()
        sizes = [int(size) for size in match.groups()[1:] if size] if match else []
        if not axes or len(axes) != len(sizes) or any(axis in degrees for axis in axes):
            return None
        degrees.update(zip(axes, sizes, strict=True))
    if "ep" in degrees and not {"dp_replicate", "dp_shard"} & set(degrees):
        degrees["dp_shard"] = degrees["ep"]
    return degrees


def meant_mesh_name(name: str) -> str:
    """The mesh name that was probably meant by one with capitals, or with other separators or none; "" if none was."""
    plain = re.sub(r"[^a-z0-9.]+", "", name.lower())  # a point is no separator: fsdp2.5
    meant = "_".join(re.findall(r"[a-z]+\d+(?:x\d+)?", plain)) if "." not in plain else ""
    return meant if meant and parse_mesh_name(meant) is not None else ""


def mesh_product(parallel: schema.Parallel) -> int | None:
    """Ranks that the mesh needs; None while a degree is -1."""
    sizes = [getattr(parallel, axis) for axis in MESH_AXES]
    return None if -1 in sizes else math.prod(sizes)


def global_batch(config: schema.Config, sizes: dict[str, int]) -> int:
    """Sequences per optimizer step over all ranks: ``train.global_batch``, or one forward of each data rank.

    A pipeline gets as many forwards as fill it, or as its file asks for.

    Args:
        sizes: the resolved degrees.
    """
    forwards = fewest_microbatches(config.parallel, sizes["pp"])
    return config.train.global_batch or config.train.local_batch * sizes["dp_replicate"] * sizes["dp_shard"] * forwards


def fewest_microbatches(parallel: schema.Parallel, ranks: int) -> int:
    """Microbatches that keep each of ``ranks`` pipeline ranks busy once; those of a file are all that it can run."""
    if ranks == 1:
        return 1
    if parallel.pp_schedule_csv is not None:
        return actions.microbatches(actions.read(parallel.pp_schedule_csv))
    return SCHEDULE_KINDS[parallel.pp_schedule].min_microbatches(ranks)


def resolve_degrees(parallel: schema.Parallel, *, world_size: int | None) -> dict[str, int]:
    """All six degrees with the -1 derived.

    Args:
        parallel: the configured degrees.
        world_size: number of ranks; None: unknown, only legal where nothing is -1.

    Raises:
        ConfigError: more than one -1, or no degrees give this number of ranks.
    """
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    derived = [axis for axis in AXES if degrees[axis] == -1]
    if len(derived) > 1:
        names = " and ".join(f"parallel.{axis}" for axis in derived)
        raise ConfigError(
            f"{names} are -1; only one can be derived",
            key=f"parallel.{derived[0]}",
            hint=" ".join(f"parallel.{axis}=1" for axis in derived if axis != "dp_shard"),
        )
    fixed = math.prod(degrees[axis] for axis in MESH_AXES if degrees[axis] != -1)
    spelled = "*".join(f"{axis}({degrees[axis]})" for axis in MESH_AXES if degrees[axis] not in (1, -1)) or "1"
    if derived == ["ep"]:
        degrees["ep"] = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    elif derived:
        degrees[derived[0]] = _derived(f"parallel.{derived[0]}", world_size, fixed, spelled)
    product = math.prod(degrees[axis] for axis in MESH_AXES)
    if world_size not in (None, product):
        raise ConfigError(
            f"the mesh {spelled} needs {product} ranks, but {world_size} are started",
            key="parallel",
            hint=f"launch.nproc={product} or parallel=auto",
        )
    return degrees


def _derived(key: str, world_size: int | None, fixed: int, spelled: str) -> int:
    if world_size is None:
        raise ConfigError("is -1, and the number of ranks is unknown", key=key, hint="launch.nproc=<ranks>")
    if world_size % fixed:
        legal = [count for count in (world_size // fixed * fixed, (world_size // fixed + 1) * fixed) if count]
        raise ConfigError(
            f"is -1, but {world_size} ranks cannot be divided by {spelled} = {fixed}",
            key=key,
            hint=" or ".join(f"launch.nproc={count}" for count in legal),
        )
    return world_size // fixed
