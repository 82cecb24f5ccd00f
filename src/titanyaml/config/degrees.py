"""Degrees of the device mesh: names such as ``hsdp2x4_tp8``, the derived -1, the product."""

import math
import re
from dataclasses import dataclass
from typing import Any

from titanyaml.config import schema
from titanyaml.errors import ConfigError, Problem
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


def check_derived(parallel: Any) -> Problem | None:
    """At most one degree is -1."""
    derived = [axis for axis in AXES if getattr(parallel, axis) == -1]
    if len(derived) < 2:
        return None
    fixes = [" ".join(f"parallel.{name}=1" for name in derived if name != axis) for axis in derived]
    message = f"{' and '.join(derived)} are -1; only one can be derived"
    return Problem(f"parallel.{derived[1]}", message, hint=" or ".join(fixes))


def check_num_ranks(parallel: Any, ranks: int, *, fixed_ranks: bool = False) -> Problem | None:
    """The degrees give that many ranks. ``fixed_ranks``: torchrun started them, so that no other number is offered."""
    degrees = {axis: getattr(parallel, axis) for axis in MESH_AXES}
    derived = next((axis for axis, degree in degrees.items() if degree == -1), "")
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    mesh = "*".join(f"{axis}({degree})" for axis, degree in degrees.items() if degree not in (1, -1)) or "1"
    if derived and ranks % product:
        nearest = [count for count in (ranks // product * product, (ranks // product + 1) * product) if count]
        plural = "s" if ranks > 1 else ""
        message = f"is -1, but {ranks} rank{plural} cannot be divided by {mesh} = {product}, the other degrees"
        hint = " or ".join(f"launch.nproc={count}" for count in nearest)
        return Problem(f"parallel.{derived}", message, allowed=f"ranks that are a multiple of {product}", hint=hint)
    if derived or ranks == product:
        return None
    hint = "parallel=auto" if fixed_ranks else f"launch.nproc={product} or parallel=auto"
    return Problem("parallel", f"the mesh {mesh} needs {product} ranks, but {ranks} are started", hint=hint)


def resolve_degrees(parallel: schema.Parallel, *, world_size: int | None) -> dict[str, int]:
    """All six degrees with the -1 derived.

    Args:
        parallel: the configured degrees.
        world_size: number of ranks; None: unknown, only legal where nothing is -1.

    Raises:
        ConfigError: more than one -1, or no degrees give this number of ranks.
    """
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    derived = next((axis for axis in AXES if degrees[axis] == -1), "")
    refusal = check_derived(parallel)
    if world_size is not None:
        refusal = refusal or check_num_ranks(parallel, world_size)
    elif derived in MESH_AXES:
        message = "is -1, and the number of ranks is unknown"
        refusal = refusal or Problem(f"parallel.{derived}", message, hint="launch.nproc=<ranks>")
    if refusal:
        raise ConfigError([refusal])
    if derived == "ep":
        degrees["ep"] = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    elif derived and world_size is not None:
        degrees[derived] = world_size // math.prod(degrees[axis] for axis in MESH_AXES if axis != derived)
    return degrees
