"""The fastest configuration that fits, on equally many ranks and with equally many sequences a step.

Candidates are pruned by the rule table, then by memory; only what is left is timed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.config import degrees, ranks, rules, schema
from titanyaml.config.schema import Config
from titanyaml.planner import configured, memory, step
from titanyaml.planner.plan import Plan

_MODES = ("none", "selective_op", "full")


@dataclass(frozen=True)
class Found:
    """A configuration that fits. change: what to type beside the rest of the command."""

    change: str
    plan: Plan

    def row(self) -> dict[str, Any]:
        """For plan.json."""
        classes = self.plan.step.classes
        longest = sorted(classes, key=lambda name: -classes[name])[:3]
        why = ", ".join(f"{name} {100 * classes[name] / self.plan.step.seconds:.0f} %" for name in longest)
        return {"change": self.change, "tps": self.plan.tps, "mfu": self.plan.mfu, "memory_gib": self.plan.total_gib,
                "why": why}


@dataclass(frozen=True)
class Result:
    """best: the fastest first. tried: candidates. legal: of them, by the rules. fitted: of these, by memory."""

    best: list[Found]
    tried: int
    legal: int
    fitted: int


def search(config: Config) -> Result:
    """Plan every candidate around ``config``: degrees, recomputation, sequences a forward, async TP."""
    world = ranks.world_size(config)
    sizes = degrees.resolve_degrees(config.parallel, world_size=world)
    batch = degrees.global_batch(config, sizes)
    tried = legal = 0
    found: list[Found] = []
    for change, candidate in _candidates(config, world, batch):
        tried += 1
        if rules.check_rules(dataclasses.asdict(candidate)):
            continue
        legal += 1
        job = configured.job(candidate)
        room = memory.plan_memory(job)
        if room.with_margin / memory.GIB <= job.device.memory_gib - job.device.reserve_gib:
            found.append(Found(change, Plan(job, step.plan_step(job), room)))
    found.sort(key=lambda one: -one.plan.tps)
    return Result(found[:10], tried, legal, len(found))


def _candidates(config: Config, world: int, batch: int) -> Iterator[tuple[str, Config]]:
    for mesh in _meshes(world, config.cluster.gpus_per_host):
        data = mesh["dp_replicate"] * mesh["dp_shard"]
        if batch % data:
            continue
        fuses = [False, True] if mesh["tp"] > 1 and config.compile.mode != "none" else [False]
        for local in _divisors(batch // data):
            for mode in _MODES:
                for fused in fuses:
                    yield _changed(config, mesh, local=local, batch=batch, mode=mode, fused=fused)


def _meshes(world: int, host: int) -> Iterator[dict[str, int]]:
    """Degrees with this product: tp within a host, copies by whole hosts."""
    for tp in [size for size in _divisors(world) if size <= host]:
        for cp in [size for size in _divisors(world // tp) if size <= 8]:
            for pp in [size for size in _divisors(world // tp // cp) if size <= 16]:
                data = world // tp // cp // pp
                for copies in [size for size in _divisors(data) if size == 1 or data // size * tp * cp >= host]:
                    yield {"dp_replicate": copies, "dp_shard": data // copies, "cp": cp, "tp": tp, "pp": pp}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _changed(
    config: Config, mesh: dict[str, int], *, local: int, batch: int, mode: str, fused: bool
) -> tuple[str, Config]:
    made: Config = copy.copy(config)
    made.parallel = dataclasses.replace(config.parallel, **mesh, ep=1)
    made.train = dataclasses.replace(config.train, local_batch=local, global_batch=batch)
    made.ac = dataclasses.replace(config.ac, mode=mode, every=schema.ActivationCheckpointing().every)
    made.compile = dataclasses.replace(config.compile, async_tp=fused)
    typed = [f"parallel={name(mesh)}", f"train.local_batch={local}", f"train.global_batch={batch}", f"ac={mode}"]
    return " ".join([*typed, "compile.async_tp=true"] if fused else typed), made


def name(mesh: dict[str, int]) -> str:
    """The mesh's name, as it is typed."""
    parts = []
    if mesh["dp_replicate"] > 1 and mesh["dp_shard"] > 1:
        parts.append(f"hsdp{mesh['dp_replicate']}x{mesh['dp_shard']}")
    elif mesh["dp_replicate"] > 1:
        parts.append(f"ddp{mesh['dp_replicate']}")
    elif mesh["dp_shard"] > 1:
        parts.append(f"fsdp{mesh['dp_shard']}")
    parts += [f"{axis}{mesh[axis]}" for axis in ("tp", "cp", "pp") if mesh[axis] > 1]
    return "_".join(parts) or "single"
