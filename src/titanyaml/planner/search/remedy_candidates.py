"""Changes of a configuration after which it needs less memory: each a kind, and values of keys.

``levers`` change one key (and those that depend on it) and leave devices and training as they are. ``meshes`` move a
factor from one axis to another, ``larger_meshes`` take more devices. Precision, sequence length and model are not
touched: with those it would be another training. Neither is host offload: the planner knows no rate of a host's link,
so that it could not say what the offload costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from titanyaml.config import degrees, schema, world
from titanyaml.config.keys import MAX_RANKS
from titanyaml.config.rules.hints import find_group_resets
from titanyaml.config.schema import Config
from titanyaml.config.schema_keys import keys_of
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
