"""What can be changed of a configuration so that it needs less memory: by kind, each as keys and values.

Changes of one key leave the devices and what is trained as they are: more recomputation, fewer sequences a forward,
smaller moments, weights that are freed, gathers in float8, another pipeline schedule, smaller chunks of the loss.
Meshes move a factor from one axis to another, or take more devices. Precision of products, length and model are not
touched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.config import degrees, ranks, schema
from titanyaml.config.keys import MAX_RANKS
from titanyaml.config.nearest import keys_of
from titanyaml.config.rules.hints import set_back
from titanyaml.config.schema import Config

#: Recomputation from the least to the most.
_AC = ("none", "memory_budget", "selective_op", "full")
#: Axes that a factor of the ranks is moved between, and those that grow with more of them.
_AXES = ("dp_shard", "tp", "pp", "cp", "dp_replicate")
_GROWING = ("dp_shard", "tp", "pp", "cp")
_LONGEST = {"cp": 8, "pp": 16}
#: Keys that nothing reads where the degree is 1.
_OF_AXIS = {
    "pp": tuple(f"parallel.{name}" for name in keys_of(schema.Parallel) if name.startswith("pp_")),
    "tp": ("compile.async_tp", "parallel.tp_sequence_parallel"),
    "cp": ("parallel.cp_method",),
}


@dataclass(frozen=True)
class Candidate:
    """kinds: what is changed. values: of keys."""

    kinds: frozenset[str]
    values: dict[str, Any]

    def joined(self, other: Candidate) -> Candidate:
        """Both changes; where both set a key, the other's."""
        return Candidate(self.kinds | other.kinds, self.values | other.values)


#: In a pipeline: a forward frees the weights that it gathered.
FREED = Candidate(frozenset({"weights"}), {"parallel.fsdp_reshard_after_forward": "always"})


def current(config: Config, key: str) -> Any:
    """The value of a key of a section."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def levers(config: Config) -> list[list[Candidate]]:
    """Changes of one kind on the same mesh, from the least to the most memory that they are known to spare."""
    sizes = degrees.resolve_degrees(config.parallel, world_size=ranks.world_size(config))
    of_kind: dict[str, list[dict[str, Any]]] = {
        "recompute": [_switched(config, "ac", mode=mode) for mode in _heavier(config.ac.mode)],
        "batch": list(_smaller(config, degrees.global_batch(config, sizes), config.train.local_batch)),
        "moments": [_switched(config, "optim", name=name) for name in ("adamw_bf16", "adamw_8bit")],
        "weights": list(_freed(config, sizes)),
        "masters": [{"optim.master": "split"}],
        "schedule": [{"parallel.pp_schedule": name} for name in ("Interleaved1F1B", "1F1B")] * (sizes["pp"] > 1),
        "loss": [
            {"loss.chunk_tokens": tokens} for tokens in (1024, 256) if tokens < (config.loss.chunk_tokens or 4096)
        ],
    }
    found = [[_candidate(config, {kind}, values) for values in ways] for kind, ways in of_kind.items()]
    return [[one for one in ways if one.values] for ways in found if any(one.values for one in ways)]


def meshes(config: Config) -> Iterator[Candidate]:
    """On the same devices, with equally many sequences a step."""
    sizes = degrees.resolve_degrees(config.parallel, world_size=ranks.world_size(config))
    batch = degrees.global_batch(config, sizes)
    for source, target in itertools.permutations(_AXES, 2):
        for times in range(2, sizes[source] + 1):
            if sizes[source] % times == 0:
                made = sizes | {source: sizes[source] // times, target: sizes[target] * times}
                yield from _on(config, made, {f"mesh with more {target}"}, batch=batch)
    experts = config.model.moe.num_experts
    for ep in range(2, experts + 1):
        if experts % ep == 0 and sizes["dp_shard"] * sizes["cp"] * sizes["tp"] % ep == 0:
            yield from _on(config, sizes | {"ep": ep}, {"mesh with more ep"}, batch=batch)


def larger(config: Config, times: int) -> Iterator[Candidate]:
    """On so many times as many devices: an axis or two longer than they are, or than without pipeline or copies."""
    sizes = degrees.resolve_degrees(config.parallel, world_size=ranks.world_size(config))
    started = {} if config.launch.nproc is None else {"launch.nproc": config.launch.nproc * times}
    for made in _grown(sizes, times):
        for ep in _experts_over(config, made):
            yield from _on(config, made | {"ep": ep}, {"devices"}, batch=config.train.global_batch, more=started)


def _grown(sizes: dict[str, int], times: int) -> Iterator[dict[str, int]]:
    flat = [
        sizes | {axis: 1, "dp_shard": sizes["dp_shard"] * sizes[axis]}
        for axis in ("pp", "dp_replicate")
        if sizes[axis] > 1
    ]
    for base in (sizes, *flat):
        yield from ({**base, axis: base[axis] * times} for axis in _GROWING)
        for one, other in itertools.permutations(_GROWING, 2):
            for share in range(2, times // 2 + 1):
                if times % share == 0 and (share, one) <= (times // share, other):
                    yield {**base, one: base[one] * share, other: base[other] * (times // share)}


def _experts_over(config: Config, sizes: dict[str, int]) -> list[int]:
    """Degrees of ep on a mesh: as it is, within a host, and as many as there can be."""
    room, count = sizes["dp_shard"] * sizes["cp"] * sizes["tp"], config.model.moe.num_experts
    spread = (math.gcd(room, count, most) for most in (config.cluster.gpus_per_host, count)) if count else ()
    return sorted({sizes["ep"], *spread})


def most_times(config: Config) -> int:
    """How many times as many devices are tried at most."""
    return min(4096, MAX_RANKS // (ranks.world_size(config) or 1))


def _candidate(config: Config, kinds: set[str], values: dict[str, Any]) -> Candidate:
    """Without what is as it was."""
    return Candidate(frozenset(kinds), {key: value for key, value in values.items() if current(config, key) != value})


def _switched(config: Config, group: str, **changed: Any) -> dict[str, Any]:
    """Values of keys of a group, with what sets those back that nothing reads then."""
    return {f"{group}.{name}": value for name, value in (changed | set_back(config, group, **changed)).items()}


def _heavier(mode: str) -> tuple[str, ...]:
    return _AC[_AC.index(mode) + 1 :] if mode in _AC else ("selective_op", "full")


def _smaller(config: Config, batch: int, most: int) -> Iterator[dict[str, Any]]:
    """Fewer sequences a forward, more forwards or microbatches a step."""
    for size in range(most - 1, 0, -1):
        if config.train.local_batch % size == 0:
            yield {"train.local_batch": size, "train.global_batch": batch}


def _freed(config: Config, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Fewer weights in full: freed after a forward, gathered in float8 (which spares some in a pipeline alone)."""
    if sizes["pp"] > 1:
        yield FREED.values
        if config.quant.recipe == "float8_tensorwise":
            yield {"quant.fsdp_float8_all_gather": True}
    elif config.parallel.fsdp_reshard_after_forward == "never":
        yield {"parallel.fsdp_reshard_after_forward": "auto"}


def _on(
    config: Config, sizes: dict[str, int], kinds: set[str], *, batch: int | None, more: dict[str, Any] | None = None
) -> Iterator[Candidate]:
    """A mesh. batch: sequences of a step that are kept; None: as many as the mesh has at ``train.local_batch``."""
    host = max(config.cluster.gpus_per_host, config.parallel.tp)
    if sizes["tp"] > host or any(
        sizes[axis] > max(most, getattr(config.parallel, axis)) for axis, most in _LONGEST.items()
    ):
        return
    unread = [key for axis, keys in _OF_AXIS.items() if sizes[axis] == 1 for key in keys]
    defaults = {key: keys_of(type(getattr(config, key.split(".")[0])))[key.split(".")[1]].default for key in unread}
    values = defaults | {f"parallel.{axis}": sizes[axis] for axis in degrees.AXES} | (more or {})
    if batch is None:
        yield _candidate(config, kinds, values)
        return
    data, local = sizes["dp_replicate"] * sizes["dp_shard"], config.train.local_batch
    fewest = degrees.fewest_microbatches(config.parallel, sizes["pp"])
    most = max((size for size in range(1, local + 1) if batch % (data * size * fewest) == 0), default=None)
    if most is not None:  # fewer sequences a forward where the step has no more of them for each rank
        values |= {"train.local_batch": most, "train.global_batch": batch}
        yield _candidate(config, kinds | {"batch"} if most < local else kinds, values)
