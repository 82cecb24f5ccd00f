"""What would make a configuration fit: the cheapest changes of different kinds, each legal and planned itself.

First changes of one key are tried, then two and three kinds together, then meshes on the same devices and on more,
alone and with others. Of each kind the fastest counts.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.config import schema
from titanyaml.config.scalar_types import spell
from titanyaml.config.rules import table
from titanyaml.config.schema import Config
from titanyaml.planner.model import from_config, memory, memory_of_kept, step
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import Memory
from titanyaml.planner.model.plan import Plan
from titanyaml.planner.search import remedy_candidates
from titanyaml.planner.search.remedy_candidates import Candidate

#: How many are named.
NAMED = 3
#: A combination stands beside a part of it that fits too only where it is faster by this share.
_WORTH = 0.01
#: Kinds of changes that are tried beside another mesh.
_BESIDE = {"recompute", "batch", "moments"}


@dataclass(frozen=True)
class Change:
    """typed: overrides to add to the command. tps: with it, a device. slowdown: share of the speed that it costs,
    negative where it gains. devices: that it takes. kinds: what it changes."""

    typed: str
    tps: float
    slowdown: float
    devices: int
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Ways:
    """found: the changes that fit, the cheapest first. nearest: of those that do not, what to type for the smallest, ""
    where none is legal; over_gib: by how much."""

    found: list[Change]
    nearest: str = ""
    over_gib: float = 0.0

    def few(self) -> str:
        """One line where fewer than ``NAMED`` fit, "" else."""
        if len(self.found) == NAMED:
            return ""
        missed = f"; the nearest, {self.nearest}, is {self.over_gib:.1f} GiB over" if self.nearest else ""
        number = "none" if not self.found else f"no more than {len(self.found)}"
        return f"{number} of the changes that were tried makes it fit{missed}"


def changes(
    config: Config,
    made: Plan,
    *,
    limit_gib: float | None = None,
    hardware: schema.Hardware | None = None,
    cluster: schema.Cluster | None = None,
) -> Ways:
    """The three changes that cost the least speed after which ``config``, planned as ``made``, fits.

    Args:
        limit_gib: None: what the device has. hardware, cluster: in place of the configured ones.
    """
    if made.fits and limit_gib is None:
        return Ways([])
    tried = _Tried(config, limit_gib or made.limit_gib, hardware, cluster)
    levers = remedy_candidates.levers(config)
    tried.all(itertools.chain.from_iterable(levers))
    tried.all(
        one.joined(other) for some, others in itertools.combinations(levers, 2) for one in some for other in others
    )
    strongest = [ways[-1] for ways in levers]
    if len(tried.kinds) < NAMED:
        tried.all(one.joined(two).joined(three) for one, two, three in itertools.combinations(strongest, 3))
    tried.meshes(remedy_candidates.meshes(config), levers)
    times, grown = 2, 0
    while times <= remedy_candidates.most_times(config) and grown < (1 if len(tried.kinds) > NAMED else NAMED):
        grown += tried.meshes(remedy_candidates.larger(config, times), levers)
        times *= 2
    each = 1 if len(tried.fitting) >= NAMED else NAMED
    found = [one for sort in tried.fitting for one in tried.fastest(sort, made, each)]
    return Ways(_chosen(found), tried.nearest, tried.over / memory.GIB)


class _Tried:
    """Candidates that were planned. fitting: those that fit, by their kinds and keys. nearest, over: of those that do
    not, and bytes."""

    def __init__(
        self, config: Config, limit_gib: float, hardware: schema.Hardware | None, cluster: schema.Cluster | None
    ) -> None:
        self.config, self.limit = config, limit_gib * memory.GIB
        self.hardware, self.cluster = hardware, cluster
        self.fitting: dict[tuple[frozenset[str], frozenset[str]], list[tuple[str, Job, Memory]]] = {}
        self.nearest, self.over = "", float("inf")

    @property
    def kinds(self) -> set[frozenset[str]]:
        """Of what fits."""
        return {kinds for kinds, _ in self.fitting}

    def all(self, many: Iterable[Candidate]) -> None:
        """Try each."""
        for one in many:
            self.fits(one)

    def meshes(self, many: Iterator[Candidate], levers: list[list[Candidate]]) -> int:
        """Try each mesh, alone or with the fewest of the strongest changes beside it that make it fit. Returns how many
        kinds of change are new."""
        before = len(self.kinds)
        for mesh in many:
            beside = [ways[-1] for ways in levers if ways[-1].kinds & _BESIDE]
            if mesh.values.get("parallel.pp", 1) > 1:
                beside.append(remedy_candidates.FREED)
            if not self.fits(_joined(mesh, beside), note=False):
                continue
            for number in range(len(beside) + 1):
                together = [_joined(mesh, some) for some in itertools.combinations(beside, number)]
                if [one for one in together if self.fits(one)]:
                    break
        return len(self.kinds) - before

    def fits(self, one: Candidate, *, note: bool = True) -> bool:
        """Whether a candidate is legal and fits; note: keep it."""
        config = _applied(self.config, one.values)
        if not one.values or table.check_rules(dataclasses.asdict(config)):
            return False
        job = from_config.job(config, hardware=self.hardware, cluster=self.cluster)
        room = memory_of_kept.plan_memory(job)
        over, typed = room.with_margin - self.limit, _typed(one.values)
        if over > 0:
            if over < self.over:
                self.nearest, self.over = typed, over
            return False
        if note:
            self.fitting.setdefault((one.kinds, frozenset(one.values)), []).append((typed, job, room))
        return True

    def fastest(self, sort: tuple[frozenset[str], frozenset[str]], made: Plan, number: int) -> list[Change]:
        """So many of one sort, over ``made``. Timed in the order of a bound, until no other can be faster."""
        bounded = sorted(
            (
                (job.tokens_per_step / job.mesh.world_size / step.least_seconds(job), typed, job, room)
                for typed, job, room in self.fitting[sort]
            ),
            key=lambda entry: -entry[0],
        )
        best: list[Change] = []
        for most, typed, job, room in bounded:
            if len(best) == number and most <= best[-1].tps:
                break
            tps = Plan(job, step.plan_step(job), room).tps
            best.append(Change(typed, tps, 1 - tps / made.tps, job.mesh.world_size, tuple(sorted(sort[0]))))
            best = sorted(best, key=lambda one: -one.tps)[:number]
        return best


def _joined(mesh: Candidate, others: Iterable[Candidate]) -> Candidate:
    for other in others:
        mesh = _with(mesh, other)
    return mesh


def _with(mesh: Candidate, other: Candidate) -> Candidate:
    """A mesh keeps the sequences of its own step, and resets what it does not read."""
    return (
        other.joined(mesh)
        if "batch" not in other.kinds
        else Candidate(mesh.kinds | other.kinds, mesh.values | {"train.local_batch": other.values["train.local_batch"]})
    )


def _chosen(found: list[Change]) -> list[Change]:
    """The cheapest, of different kinds: one on another mesh and one on more devices, more of these where nothing else
    is left."""
    found = sorted(found, key=lambda one: (one.slowdown, one.devices))
    worth = [
        one
        for one in found
        if not any(set(other.kinds) < set(one.kinds) and other.slowdown <= one.slowdown + _WORTH for other in found)
    ]
    picked: dict[Any, Change] = {}
    for one in worth:
        picked.setdefault("devices" if "devices" in one.kinds else "mesh" if _mesh(one) else one.kinds, one)
    for one in worth:
        picked.setdefault(_mesh(one) or one.kinds, one)
    for one in found:
        picked.setdefault(one.kinds, one)
    picked |= {one.typed: one for one in found}
    first = list(dict.fromkeys(picked.values()))[:NAMED]
    return sorted(first, key=lambda one: (one.slowdown, one.devices))


def _mesh(one: Change) -> str:
    """The axis that a change makes longer on the same devices, "" where it does not."""
    return next((kind for kind in one.kinds if kind.startswith("mesh")), "")


def _typed(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={spell(value)}" for key, value in values.items())


def _applied(config: Config, values: dict[str, Any]) -> Config:
    made: Config = copy.copy(config)
    for key, value in values.items():
        section, name = key.split(".")
        setattr(made, section, dataclasses.replace(getattr(made, section), **{name: value}))
    return made
