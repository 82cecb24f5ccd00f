"""What would make a configuration fit: the cheapest changes of different kinds, each legal and planned itself.

First changes of one key are tried, then two and three kinds together, then other meshes of the same devices, then more
devices, alone and with the strongest of the others. Three changes are named, of different kinds rather than the three
fastest: whoever cannot change the mesh, or has no more devices, must find one too.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from titanyaml.config import degrees, schema, world
from titanyaml.config.keys import MAX_RANKS
from titanyaml.config.rules import table
from titanyaml.config.rules.hints import find_group_resets
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema import Config
from titanyaml.config.schema_keys import keys_of
from titanyaml.planner.model import from_config, memory, step
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import Memory
from titanyaml.planner.model.plan import Plan
from titanyaml.planner.search.space import LONGEST_AXES, divisors
from titanyaml.planner.search.variants import default_of

#: Modes of ``ac`` from the least to the most recomputation.
_AC_MODES = ("none", "memory_budget", "selective_op", "full")
#: Axes between which a factor of the ranks is moved, and those that grow on more devices.
_MOVABLE_AXES = ("dp_shard", "tp", "pp", "cp", "dp_replicate")
_GROWING_AXES = ("dp_shard", "tp", "pp", "cp")  # more replicas would spare nothing
#: Keys that nothing reads where the degree of the axis is 1.
_KEYS_OF_AXIS = {
    "pp": tuple(f"parallel.{name}" for name in keys_of(schema.Parallel) if name.startswith("pp_")),
    "tp": ("compile.async_tp", "parallel.tp_sequence_parallel"),
    "cp": ("parallel.cp_method",),
}


@dataclass(frozen=True)
class Candidate:
    """Values of keys, and the kinds of change that they make."""

    kinds: frozenset[str]
    values: dict[str, Any]

    def joined(self, other: Candidate) -> Candidate:
        """Both changes; of a key that both set, the other's value."""
        return Candidate(self.kinds | other.kinds, self.values | other.values)


#: In a pipeline: free gathered weights after each forward.
FREE_WEIGHTS = Candidate(frozenset({"weights"}), {"parallel.fsdp_reshard_after_forward": "always"})


def levers(config: Config) -> list[list[Candidate]]:
    """Changes on the same mesh, by kind, within one from the least to the most memory that it spares."""
    sizes, mode = _degrees(config), config.ac.mode
    heavier_modes = _AC_MODES[_AC_MODES.index(mode) + 1 :] if mode in _AC_MODES else ("selective_op", "full")
    chunk_tokens = config.loss.chunk_tokens or 4096
    values_of_kind: dict[str, list[dict[str, Any]]] = {
        "recompute": [_switched(config, "ac", mode=mode) for mode in heavier_modes],
        "batch": list(_smaller_batches(config, degrees.global_batch(config, sizes))),
        "moments": [_switched(config, "optim", name=name) for name in ("adamw_bf16", "adamw_8bit")],
        "weights": list(_fewer_whole_weights(config, sizes)),
        "masters": [{"optim.master": "split"}],
        "schedule": [{"parallel.pp_schedule": name} for name in ("Interleaved1F1B", "1F1B") if sizes["pp"] > 1],
        "loss": [{"loss.chunk_tokens": tokens} for tokens in (1024, 256) if tokens < chunk_tokens],
    }
    changed = [[_candidate(config, {kind}, values) for values in many] for kind, many in values_of_kind.items()]
    effective = [[candidate for candidate in candidates if candidate.values] for candidates in changed]
    return [candidates for candidates in effective if candidates]


def meshes(config: Config) -> Iterator[Candidate]:
    """Other meshes of the same devices, with equally many sequences a step."""
    sizes = _degrees(config)
    batch = degrees.global_batch(config, sizes)
    for source, target in itertools.permutations(_MOVABLE_AXES, 2):
        for factor in divisors(sizes[source])[1:]:
            moved = sizes | {source: sizes[source] // factor, target: sizes[target] * factor}
            yield from _on_mesh(config, moved, f"mesh with more {target}", batch=batch)
    for ep in divisors(config.model.moe.num_experts)[1:]:
        if sizes["dp_shard"] * sizes["cp"] * sizes["tp"] % ep == 0:
            yield from _on_mesh(config, sizes | {"ep": ep}, "mesh with more ep", batch=batch)


def larger_meshes(config: Config, factor: int) -> Iterator[Candidate]:
    """Meshes of ``factor`` times as many devices: one axis or two are longer, also with pipeline or replicas undone."""
    launch = {} if config.launch.nproc is None else {"launch.nproc": config.launch.nproc * factor}
    for sizes in _grown(_degrees(config), factor):
        for ep in _expert_degrees(config, sizes):
            yield from _on_mesh(config, sizes | {"ep": ep}, "devices", batch=config.train.global_batch, extra=launch)


def largest_factor(config: Config) -> int:
    """How many times as many devices are tried at most."""
    return min(4096, MAX_RANKS // (world.count_ranks(config) or 1))


def _degrees(config: Config) -> dict[str, int]:
    return degrees.resolve_degrees(config.parallel, world_size=world.count_ranks(config))


def _grown(sizes: dict[str, int], factor: int) -> Iterator[dict[str, int]]:
    # without its pipeline or replicas a mesh shards more: sometimes that is what makes room
    long_axes = [axis for axis in ("pp", "dp_replicate") if sizes[axis] > 1]
    undone = [sizes | {axis: 1, "dp_shard": sizes["dp_shard"] * sizes[axis]} for axis in long_axes]
    for base in (sizes, *undone):
        yield from ({**base, axis: base[axis] * factor} for axis in _GROWING_AXES)
        for first, second in itertools.permutations(_GROWING_AXES, 2):
            for share in range(2, factor // 2 + 1):
                # ordered, so that no pair comes twice
                if factor % share == 0 and (share, first) <= (factor // share, second):
                    yield {**base, first: base[first] * share, second: base[second] * (factor // share)}


def _expert_degrees(config: Config, sizes: dict[str, int]) -> list[int]:
    """Degrees of ep on a mesh: the present one, the largest within a host, and the largest there can be."""
    num_experts = config.model.moe.num_experts
    if not num_experts:
        return [sizes["ep"]]
    num_ranks = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    limits = (config.cluster.gpus_per_host, num_experts)
    return sorted({sizes["ep"], *(math.gcd(num_ranks, num_experts, limit) for limit in limits)})


def _candidate(config: Config, kinds: set[str], values: dict[str, Any]) -> Candidate:
    """Of these values those that differ from the configuration's."""
    changed = {key: value for key, value in values.items() if attrgetter(key)(config) != value}
    return Candidate(frozenset(kinds), changed)


def _switched(config: Config, group: str, **changed: Any) -> dict[str, Any]:
    """Changed keys of a group, and the defaults of those that nothing reads after the change."""
    return {f"{group}.{name}": value for name, value in (changed | find_group_resets(config, group, **changed)).items()}


def _smaller_batches(config: Config, global_batch: int) -> Iterator[dict[str, Any]]:
    """Fewer sequences a forward, and so more forwards or microbatches a step."""
    for size in range(config.train.local_batch - 1, 0, -1):
        if config.train.local_batch % size == 0:
            yield {"train.local_batch": size, "train.global_batch": global_batch}


def _fewer_whole_weights(config: Config, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Fewer gathered weights at a time. A pipeline keeps them between microbatches; gathers in float8 spare there."""
    if sizes["pp"] > 1:
        yield FREE_WEIGHTS.values
        if config.quant.recipe == "float8_tensorwise":
            yield {"quant.fsdp_float8_all_gather": True}
    elif config.parallel.fsdp_reshard_after_forward == "never":
        yield {"parallel.fsdp_reshard_after_forward": "auto"}


def _on_mesh(
    config: Config, sizes: dict[str, int], kind: str, *, batch: int | None, extra: dict[str, Any] | None = None
) -> Iterator[Candidate]:
    """The mesh, if it is of a usual shape and divides the batch; unread keys of axes are set to their defaults."""
    longest_axes = {"tp": config.cluster.gpus_per_host, **LONGEST_AXES}
    if any(sizes[axis] > max(longest, getattr(config.parallel, axis)) for axis, longest in longest_axes.items()):
        return
    defaults = {key: default_of(key) for axis, keys in _KEYS_OF_AXIS.items() if sizes[axis] == 1 for key in keys}
    values = defaults | {f"parallel.{axis}": sizes[axis] for axis in degrees.AXES} | (extra or {})
    if batch is None:  # ``train.local_batch`` for each data rank
        yield _candidate(config, {kind}, values)
        return
    data_degree, local_batch = sizes["dp_replicate"] * sizes["dp_shard"], config.train.local_batch
    # more data ranks leave each of them fewer sequences of the step: then a forward takes fewer of them
    divisor = data_degree * degrees.fewest_microbatches(config.parallel, sizes["pp"])
    largest = max((size for size in range(1, local_batch + 1) if batch % (divisor * size) == 0), default=None)
    if largest is not None:
        values |= {"train.local_batch": largest, "train.global_batch": batch}
        yield _candidate(config, {kind, "batch"} if largest < local_batch else {kind}, values)


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
    candidates_by_kind = levers(config)
    trials.try_all(
        itertools.chain.from_iterable(candidates_by_kind)
    )  # all of a kind: the mildest that fits is the cheapest
    pairs = (itertools.product(*two_kinds) for two_kinds in itertools.combinations(candidates_by_kind, 2))
    trials.try_all(first.joined(second) for first, second in itertools.chain.from_iterable(pairs))
    strongest = [candidates[-1] for candidates in candidates_by_kind]
    if len(trials.kinds) < NUM_NAMED:  # only the strongest of each kind: all triples would be thousands
        triples = itertools.combinations(strongest, 3)
        trials.try_all(first.joined(second).joined(third) for first, second, third in triples)
    trials.try_meshes(meshes(config), strongest)
    # one remedy with more devices is enough where others fit, and there the smallest number of devices is asked for
    factor, new_kinds = 2, 0
    while factor <= largest_factor(config):
        if new_kinds >= (1 if len(trials.kinds) > NUM_NAMED else NUM_NAMED):
            break
        new_kinds += trials.try_meshes(larger_meshes(config, factor), strongest)
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
                extras.append(FREE_WEIGHTS)
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
