"""The fastest configurations that fit, on equally many ranks and with equally many sequences a step.

Candidates are pruned by the rule table, then by memory. What is left is timed in the order of a bound, the time that a
rank only computes, until no other can be among the best: the result is that of timing them all.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.config import degrees, ranks, rules, schema
from titanyaml.config.schema import Config
from titanyaml.config.view import Unknown, View
from titanyaml.planner import configured, kept, memory, step
from titanyaml.planner.inputs import Job
from titanyaml.planner.plan import Plan

BEST = 10
#: Keys of which a search chooses the values; rules that read none of them hold for all candidates or for none.
KEYS = (*(f"parallel.{axis}" for axis in degrees.AXES), "parallel.pp_schedule", "train.local_batch",
        "train.global_batch", "ac.mode", "ac.every", "quant.recipe", "quant.fsdp_float8_all_gather", "compile.async_tp",
        "launch.nproc")


@dataclass(frozen=True)
class Space:
    """What is tried.

    Args:
        meshes: degrees, all else 1; None: every product of divisors. axes: the only degrees of an axis.
        local_batch: None: every divisor of a data rank's sequences. gather: whether FSDP gathers float8; None: both
            where it can.
    """

    meshes: tuple[dict[str, int], ...] | None = None
    axes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    ac: tuple[str, ...] = ("none", "memory_budget", "selective_op", "full")
    quant: tuple[str, ...] = ("none", "float8_tensorwise", "float8_rowwise")
    gather: tuple[bool, ...] | None = None
    local_batch: tuple[int, ...] | None = None
    schedule: tuple[str, ...] = ("1F1B", "Interleaved1F1B")
    async_tp: tuple[bool, ...] = (False, True)


@dataclass(frozen=True)
class Found:
    """A configuration that fits. change: what to type beside the rest of the command."""

    change: str
    plan: Plan

    def row(self) -> dict[str, Any]:
        """For search.json."""
        classes = self.plan.step.classes
        longest = sorted(classes, key=lambda name: -classes[name])[:3]
        why = ", ".join(f"{name} {100 * classes[name] / self.plan.step.seconds:.0f} %" for name in longest)
        return {"change": self.change, "tps": self.plan.tps, "mfu": self.plan.mfu, "memory_gib": self.plan.total_gib,
                "why": why}


@dataclass
class Result:
    """best: the fastest first. tried: candidates. legal: of them, by the rules. fitted: of these, by memory. refused:
    how many each rule's words refused."""

    best: list[Found] = dataclasses.field(default_factory=list)
    tried: int = 0
    legal: int = 0
    fitted: int = 0
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def search(config: Config, space: Space) -> Result:
    """Plan candidates around ``config``: on as many ranks as it starts, or as a mesh given has; of a global batch as it
    says, else ``train.local_batch`` sequences for each rank.

    Raises:
        ConfigError: the device, the links or the model are not known well enough.
    """
    base = dataclasses.asdict(config)
    asked = [rule for rule in rules.RULES if _depends(rule, base)]
    result, fitting = Result(), []
    for change, candidate in _candidates(config, space):
        result.tried += 1
        if problem := _problem(asked, base, candidate):
            result.refused[problem] += 1
            continue
        result.legal += 1
        job = configured.job(candidate)
        room = kept.plan_memory(job)
        if room.with_margin / memory.GIB <= job.device.memory_gib - job.device.reserve_gib:
            fitting.append((step.least_seconds(job) / job.tokens_per_step * job.mesh.world_size, change, job, room))
    result.fitted = len(fitting)
    result.best = _fastest(fitting)
    return result


def _fastest(fitting: list[tuple[float, str, Job, memory.Memory]]) -> list[Found]:
    """The best of (least seconds a token and device, change, job, memory)."""
    best: list[Found] = []
    for least, change, job, room in sorted(fitting, key=lambda one: one[0]):
        if len(best) == BEST and 1 / least <= best[-1].plan.tps:
            break
        best.append(Found(change, Plan(job, step.plan_step(job), room)))
        best = sorted(best, key=lambda one: -one.plan.tps)[:BEST]
    return best


class _Watched(View):
    """Notes whether a key among KEYS is read."""

    def __init__(self, values: dict[str, Any], path: str = "", read: list[str] | None = None) -> None:
        super().__init__(values)
        self._path, self.read = path, [] if read is None else read

    def __getattr__(self, name: str) -> Any:
        inner = f"{self._path}.{name}" if self._path else name
        value = self._values.get(name)
        if isinstance(value, dict):
            return _Watched(value, inner, self.read)
        self.read += [inner] * (inner in KEYS)
        return super().__getattr__(name)


def _depends(rule: rules.Rule, base: dict[str, Any]) -> bool:
    """Whether what a rule says can differ between candidates. Until it reads such a key it has seen the same of all."""
    watched = _Watched(base)
    try:
        rule.check(watched)
    except Unknown:
        return True
    return bool(watched.read)


def _problem(asked: list[rules.Rule], base: dict[str, Any], candidate: Config) -> str:
    """What the first broken rule says, "" where none is."""
    changed = ("parallel", "train", "ac", "quant", "compile", "launch")
    view = View(base | {name: dict(vars(getattr(candidate, name))) for name in changed})
    for rule in asked:
        try:
            if problem := rule.check(view):
                return f"{problem.key} {problem.message}"
        except Unknown:
            continue
    return ""


def _candidates(config: Config, space: Space) -> Iterator[tuple[str, Config]]:
    world = ranks.world_size(config)
    host = config.cluster.gpus_per_host
    for mesh in space.meshes or _with_experts(config, _meshes(world, host, space.axes), space):
        data, size = mesh["dp_replicate"] * mesh["dp_shard"], math.prod(mesh[axis] for axis in degrees.MESH_AXES)
        batch = config.train.global_batch or config.train.local_batch * size
        if batch % data:
            continue
        fuses = space.async_tp if mesh["tp"] > 1 and config.compile.mode != "none" else (False,)
        for local in space.local_batch or _divisors(batch // data):
            for mode in space.ac:
                for recipe, gather in _recipes(config, space, mesh):
                    for schedule in space.schedule if mesh["pp"] > 1 else (config.parallel.pp_schedule,):
                        for fused in fuses:
                            yield _changed(config, mesh, local=local, batch=batch, mode=mode, recipe=recipe,
                                           gather=gather, schedule=schedule, fused=fused)


def _recipes(config: Config, space: Space, mesh: dict[str, int]) -> Iterator[tuple[str, bool]]:
    for recipe in space.quant:
        if recipe in ("float8_tensorwise", "float8_rowwise") and config.hardware.gemm_fp8_tflops is None:
            continue
        can = recipe == "float8_tensorwise" and mesh["dp_shard"] * mesh["cp"] > 1
        for gather in (space.gather or (False, True)) if can else (False,):
            yield recipe, gather


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


def _changed(
    config: Config, mesh: dict[str, int], *, local: int, batch: int, mode: str, recipe: str, gather: bool,
    schedule: str, fused: bool,
) -> tuple[str, Config]:
    made: Config = copy.copy(config)
    made.parallel = dataclasses.replace(config.parallel, **mesh, pp_schedule=schedule)
    made.train = dataclasses.replace(config.train, local_batch=local, global_batch=batch)
    made.ac = dataclasses.replace(config.ac, mode=mode, every=schema.ActivationCheckpointing().every)
    made.quant = dataclasses.replace(config.quant, recipe=recipe, fsdp_float8_all_gather=gather)
    made.compile = dataclasses.replace(config.compile, async_tp=fused)
    made.launch = dataclasses.replace(config.launch, nproc=None)
    typed = [f"parallel={name(mesh)}", f"train.local_batch={local}", f"train.global_batch={batch}", f"ac={mode}"]
    typed += [f"quant={recipe}"] * (recipe != "none") + ["quant.fsdp_float8_all_gather=true"] * gather
    typed += [f"parallel.pp_schedule={schedule}"] * (mesh["pp"] > 1) + ["compile.async_tp=true"] * fused
    return " ".join(typed), made


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
