"""What would make a configuration fit: the cheapest changes of different kinds, each legal and planned itself.

First changes of one key are tried, then two and three kinds together, then other meshes of the same devices, then more
devices, alone and with the strongest of the others. Three changes are named, of different kinds rather than the three
fastest: whoever cannot change the mesh, or has no more devices, must find one too.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titanyaml.config import schema
from titanyaml.config.rules import table
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema import Config
from titanyaml.planner.model import from_config, memory, step
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import Memory
from titanyaml.planner.model.plan import Plan
from titanyaml.planner.search import remedy_candidates
from titanyaml.planner.search.remedy_candidates import Candidate

#: How many remedies are named.
NUM_NAMED = 3
#: A combination is named beside a part of it that fits too only where it is faster by this share.
_WORTH = 0.01
#: Kinds of changes that are tried together with another mesh.
_WITH_MESH = {"recompute", "batch", "moments"}
#: Kinds of change, and the keys that a change sets.
_Sort = tuple[frozenset[str], frozenset[str]]


@dataclass(frozen=True)
class Remedy:
    """A change after which a configuration fits."""

    typed: str  # overrides to add to the command
    tps: float  # tokens/s of a device with it
    slowdown: float  # share of the speed that it costs, negative where it gains
    devices: int  # that it takes
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Remedies:
    """Remedies, the cheapest first; of what does not fit, the change that misses by the least ("": none is legal)."""

    remedies: list[Remedy]
    nearest: str = ""
    over_gib: float = 0.0

    def remark(self) -> str:
        """A line that says so where fewer than ``NUM_NAMED`` fit, else ""."""
        if len(self.remedies) == NUM_NAMED:
            return ""
        missed = f"; the nearest, {self.nearest}, is {self.over_gib:.1f} GiB over" if self.nearest else ""
        number = f"no more than {len(self.remedies)}" if self.remedies else "none"
        return f"{number} of the changes that were tried makes it fit{missed}"


def find_remedies(
    config: Config,
    plan: Plan,
    *,
    limit_gib: float | None = None,
    hardware: schema.Hardware | None = None,
    cluster: schema.Cluster | None = None,
) -> Remedies:
    """The three changes that cost the least speed after which ``config``, planned as ``plan``, fits.

    ``limit_gib``, ``hardware`` and ``cluster`` stand in place of the configured device's, where they are given.
    """
    if plan.fits and limit_gib is None:
        return Remedies([])
    trials = _Trials(config, limit_gib or plan.limit_gib, hardware=hardware, cluster=cluster)
    levers = remedy_candidates.levers(config)
    trials.try_all(itertools.chain.from_iterable(levers))  # all of a kind: the mildest that fits is the cheapest
    pairs = (itertools.product(*two_kinds) for two_kinds in itertools.combinations(levers, 2))
    trials.try_all(first.joined(second) for first, second in itertools.chain.from_iterable(pairs))
    strongest = [candidates[-1] for candidates in levers]
    if len(trials.kinds) < NUM_NAMED:  # only the strongest of each kind: all triples would be thousands
        triples = itertools.combinations(strongest, 3)
        trials.try_all(first.joined(second).joined(third) for first, second, third in triples)
    trials.try_meshes(remedy_candidates.meshes(config), strongest)
    # one remedy with more devices is enough where others fit, and there the smallest number of devices is asked for
    factor, new_kinds = 2, 0
    while factor <= remedy_candidates.largest_factor(config):
        if new_kinds >= (1 if len(trials.kinds) > NUM_NAMED else NUM_NAMED):
            break
        new_kinds += trials.try_meshes(remedy_candidates.larger_meshes(config, factor), strongest)
        factor *= 2
    number = 1 if len(trials.fitting) >= NUM_NAMED else NUM_NAMED
    fastest = [remedy for sort in trials.fitting for remedy in trials.fastest(sort, plan, number)]
    return Remedies(_select(fastest), trials.nearest, trials.over_bytes / memory.GIB)


class _Trials:
    """Candidates that were planned: by sort those that fit, and the nearest of those that do not."""

    def __init__(self, config: Config, limit_gib: float, **device: Any) -> None:
        self.config, self.limit = config, limit_gib * memory.GIB
        self.device = device  # hardware and cluster, of ``from_config.job``
        self.fitting: dict[_Sort, list[tuple[str, Job, Memory]]] = {}
        self.nearest, self.over_bytes = "", math.inf

    @property
    def kinds(self) -> set[frozenset[str]]:
        return {kinds for kinds, _ in self.fitting}

    def try_all(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            self.fits(candidate)

    def try_meshes(self, meshes: Iterable[Candidate], strongest: Sequence[Candidate]) -> int:
        """Plan each mesh with the fewest of the strongest changes that make it fit; returns how many kinds are new."""
        num_kinds = len(self.kinds)
        for mesh in meshes:
            extras = [candidate for candidate in strongest if candidate.kinds & _WITH_MESH]
            if mesh.values.get("parallel.pp", 1) > 1:
                extras.append(remedy_candidates.FREE_WEIGHTS)
            # with all of them it needs the least memory: most meshes end here
            if not self.fits(_combined(mesh, extras), keep=False):
                continue
            for number in range(len(extras) + 1):
                combined = [_combined(mesh, some) for some in itertools.combinations(extras, number)]
                fitting = [candidate for candidate in combined if self.fits(candidate)]  # all of this number are kept
                if fitting:
                    break
        return len(self.kinds) - num_kinds

    def fits(self, candidate: Candidate, *, keep: bool = True) -> bool:
        """Whether a candidate is legal and fits; keep: remember it."""
        config = _applied(self.config, candidate.values)
        if not candidate.values or table.check_rules(dataclasses.asdict(config)):
            return False
        job = from_config.job(config, **self.device)
        planned = memory.plan_memory(job)
        typed = " ".join(f"{key}={spell(value)}" for key, value in candidate.values.items())
        over_bytes = planned.with_margin - self.limit
        if over_bytes > 0:
            if over_bytes < self.over_bytes:
                self.nearest, self.over_bytes = typed, over_bytes
            return False
        if keep:
            sort = candidate.kinds, frozenset(candidate.values)
            self.fitting.setdefault(sort, []).append((typed, job, planned))
        return True

    def fastest(self, sort: _Sort, plan: Plan, number: int) -> list[Remedy]:
        """The ``number`` fastest of one sort, compared with ``plan``."""

        def highest_tps(job: Job) -> float:
            return job.tokens_per_step / job.mesh.world_size / step.least_seconds(job)

        # Timing is the slow part. So they are timed in the order of an upper bound of their speed, until none that is
        # left can be among the fastest.
        fastest: list[Remedy] = []
        for typed, job, planned in sorted(self.fitting[sort], key=lambda entry: -highest_tps(entry[1])):
            if len(fastest) == number and highest_tps(job) <= fastest[-1].tps:
                break
            tps = Plan(job, step.plan_step(job), planned).tps
            fastest.append(Remedy(typed, tps, 1 - tps / plan.tps, job.mesh.world_size, tuple(sorted(sort[0]))))
            fastest = sorted(fastest, key=lambda remedy: -remedy.tps)[:number]
        return fastest


def _combined(mesh: Candidate, changes: Iterable[Candidate]) -> Candidate:
    """A mesh with other changes. It keeps the sequences of its own step, and resets what it does not read."""
    for change in changes:
        if "batch" in change.kinds:
            local_batch = {"train.local_batch": change.values["train.local_batch"]}
            mesh = Candidate(mesh.kinds | change.kinds, mesh.values | local_batch)
        else:
            mesh = change.joined(mesh)
    return mesh


def _select(remedies: list[Remedy]) -> list[Remedy]:
    """The cheapest of different kinds: at most one on another mesh and one on more devices, unless too few are left."""
    remedies = sorted(remedies, key=_cost)

    def is_worthwhile(remedy: Remedy) -> bool:
        parts = [part for part in remedies if set(part.kinds) < set(remedy.kinds)]
        return all(part.slowdown > remedy.slowdown + _WORTH for part in parts)

    worthwhile = list(filter(is_worthwhile, remedies))
    # by what they change, from the strictest distinction to none: the first of each fills the list
    selected: dict[Any, Remedy] = {}
    for remedy in worthwhile:
        is_larger, is_mesh = "devices" in remedy.kinds, bool(_longer_axis(remedy))
        selected.setdefault("devices" if is_larger else "mesh" if is_mesh else remedy.kinds, remedy)
    for remedy in worthwhile:
        selected.setdefault(_longer_axis(remedy) or remedy.kinds, remedy)
    for remedy in remedies:
        selected.setdefault(remedy.kinds, remedy)
    selected |= {remedy.typed: remedy for remedy in remedies}
    return sorted(list(dict.fromkeys(selected.values()))[:NUM_NAMED], key=_cost)


def _cost(remedy: Remedy) -> tuple[float, int]:
    return remedy.slowdown, remedy.devices


def _longer_axis(remedy: Remedy) -> str:
    """The kind that names the axis which grows on the same devices, "" without."""
    return next((kind for kind in remedy.kinds if kind.startswith("mesh")), "")


def _applied(config: Config, values: dict[str, Any]) -> Config:
    changed: Config = copy.copy(config)
    for key, value in values.items():
        section, name = key.split(".")
        setattr(changed, section, dataclasses.replace(getattr(changed, section), **{name: value}))
    return changed
