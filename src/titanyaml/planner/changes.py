"""What would make a configuration fit: changes of one thing, each a legal configuration that was planned itself."""

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

#: Recomputation from the least to the most.
_AC = ("none", "memory_budget", "selective_op", "full")


@dataclass(frozen=True)
class Change:
    """typed: overrides to add to the command. tps: with it, a device. slowdown: share of the speed that it costs,
    negative where it gains. devices: that it takes."""

    typed: str
    tps: float
    slowdown: float
    devices: int


def changes(
    config: Config, made: Plan, *, limit_gib: float | None = None, hardware: schema.Hardware | None = None,
    cluster: schema.Cluster | None = None,
) -> list[Change]:
    """The three changes that cost the least speed after which ``config``, planned as ``made``, fits.

    Args:
        limit_gib: None: what the device has. hardware, cluster: in place of the configured ones.
    """
    if made.fits and limit_gib is None:
        return []
    limit_gib = limit_gib or made.limit_gib
    found: dict[str, Change] = {}
    for values in _candidates(config):
        values = {key: value for key, value in values.items() if _current(config, key) != value}
        candidate = _applied(config, values)
        if rules.check_rules(dataclasses.asdict(candidate)):
            continue
        job = configured.job(candidate, hardware=hardware, cluster=cluster)
        room = memory.plan_memory(job)
        if room.with_margin / memory.GIB > limit_gib:
            continue
        planned = Plan(job, step.plan_step(job), room)
        typed = " ".join(f"{key}={value}" for key, value in values.items())
        found[typed] = Change(typed, planned.tps, 1 - planned.tps / made.tps, job.mesh.world_size)
    return sorted(found.values(), key=lambda one: (one.slowdown, one.devices))[:3]


def _current(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _applied(config: Config, values: dict[str, Any]) -> Config:
    made: Config = copy.copy(config)
    for key, value in values.items():
        section, name = key.split(".")
        setattr(made, section, dataclasses.replace(getattr(made, section), **{name: value}))
    return made


def _candidates(config: Config) -> Iterator[dict[str, Any]]:
    """More recomputation, fewer sequences a forward, both; smaller moments; the same ranks otherwise; more ranks."""
    ranked = ranks.world_size(config)
    sizes = degrees.resolve_degrees(config.parallel, world_size=ranked)
    batch = degrees.global_batch(config, sizes)
    heavier = [{"ac.mode": mode} for mode in _AC[_AC.index(config.ac.mode) + 1 :]] if config.ac.mode in _AC else [
        {"ac.mode": "full"}]
    fewer = [{"train.local_batch": size, "train.global_batch": batch} for size in range(1, config.train.local_batch)
             if config.train.local_batch % size == 0]
    yield from heavier
    yield from fewer
    for size in fewer:
        yield {"ac.mode": "full", **size}
    for name in ("adamw_bf16", "adamw_8bit"):
        yield {"optim.name": name}
    if config.parallel.fsdp_reshard_after_forward == "never":
        yield {"parallel.fsdp_reshard_after_forward": "auto"}
    kept = {"train.global_batch": batch} if config.train.global_batch is not None else {}
    for mesh in _meshes(sizes):
        yield mesh
        yield {"ac.mode": "full", **mesh}
    for times in (2, 4, 8, 16, 32, 64):
        wider = {"parallel.dp_shard": sizes["dp_shard"] * times, **kept}
        if config.launch.nproc is not None:
            wider["launch.nproc"] = config.launch.nproc * times
        yield wider
        yield {"ac.mode": "full", **wider}
        if fewer:
            yield {"ac.mode": "full", **wider, "train.local_batch": 1}
        if times <= 8:
            split = {key: value for key, value in wider.items() if key != "parallel.dp_shard"}
            yield {"ac.mode": "full", "parallel.tp": sizes["tp"] * times, **split}


def _meshes(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Twice, four times, eight times the degree of one axis, as many times less of another."""
    for source, targets in {"dp_shard": ("tp", "cp", "pp"), "dp_replicate": ("dp_shard", "tp", "pp")}.items():
        for target in targets:
            for times in (2, 4, 8):
                if sizes[source] % times == 0:
                    yield {f"parallel.{target}": sizes[target] * times, f"parallel.{source}": sizes[source] // times}
