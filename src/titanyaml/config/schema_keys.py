"""The keys of the schema by name, and the nearest one to a wrong name."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from titanyaml.config import schema

_FOREIGN_NAMES_OF = {
    "parallel.tp": ("tensor_parallel_degree", "tensor_model_parallel_size", "tensor_parallel_size"),
    "parallel.cp": ("context_parallel_degree", "context_parallel_size"),
    "parallel.pp": ("pipeline_parallel_degree", "pipeline_model_parallel_size", "pipeline_parallel_size"),
    "parallel.ep": ("expert_parallel_degree", "expert_model_parallel_size"),
    "parallel.dp_shard": ("data_parallel_shard_degree", "fsdp"),
    "parallel.dp_replicate": ("data_parallel_replicate_degree",),
    "train.local_batch": ("micro_batch_size",),
}
#: Names of torchtitan, Megatron and Lightning, with our key.
FOREIGN_NAMES = {name: key for key, names in _FOREIGN_NAMES_OF.items() for name in names}


@dataclass(frozen=True)
class Key:
    """One field of the schema.

    Args:
        kind: its type without ``| None``. optional: null is legal.
        default: literal default. rules: the metadata that ``keys.key`` attached.
    """

    name: str
    kind: Any
    optional: bool
    default: Any
    rules: Mapping[str, Any]

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.kind)


@cache
def keys_of(section: type) -> dict[str, Key]:
    """The fields of a schema class by name."""
    hints = typing.get_type_hints(section)  # annotations are texts (from __future__ import annotations)
    return {field.name: _key(field, hints[field.name]) for field in dataclasses.fields(section)}


def _key(field: dataclasses.Field[Any], hint: Any) -> Key:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not type(None)]  # one: the schema has no other unions
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()  # keys.key gives every field one of them
    return Key(field.name, kinds[0], len(kinds) < len(members), default, field.metadata)


@cache
def all_keys(section: type = schema.Config, prefix: str = "") -> tuple[str, ...]:
    """All dotted keys, sections included."""
    keys: list[str] = []
    for name, key in keys_of(section).items():
        keys.append(prefix + name)
        if key.is_section:
            keys += all_keys(key.kind, f"{prefix}{name}.")
    return tuple(keys)


def find_key(dotted: str) -> Key | None:
    """The schema's field of that name, None if there is none; a key inside ``user`` finds ``user``."""
    section: Any = schema.Config
    key = None  # of the part of the path that has been walked
    for name in dotted.split("."):
        if key is not None and not key.is_section:
            return key if key.kind == dict[str, Any] else None
        key = keys_of(section).get(name)
        if key is None:
            return None
        section = key.kind
    return key


def is_under(key: str, names: Iterable[str]) -> bool:
    """Whether ``key`` is one of ``names`` or below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def nearest(name: str, names: Iterable[str], *, count: int = 1) -> list[str]:
    """Up to ``count`` similar names, whatever the case: those that begin with ``name``, shortest first, then by
    similarity."""
    by_lower_case = {candidate.casefold(): candidate for candidate in names}
    name = name.casefold()
    # "warmup" means warmup_steps, which difflib finds too different; two letters begin too many names
    longer = [candidate for candidate in by_lower_case if len(name) > 2 and candidate.startswith(name)]
    similar = difflib.get_close_matches(name, by_lower_case, n=count, cutoff=0.6)
    ranked = dict.fromkeys([*sorted(longer, key=len), *similar])  # without repeats
    return [by_lower_case[candidate] for candidate in ranked][:count]


def nearest_key(dotted: str) -> str:
    """The schema's key that was probably meant, "" if nothing is near.

    Tried in turn: another tool's name for it, a similar name in the same section, the same name in the section that
    was probably meant, the same name anywhere (at once for a name without a section), the most similar dotted key.
    """
    parent, _, leaf = dotted.rpartition(".")
    prefix = f"{parent}." if parent else ""
    keys = all_keys()
    if leaf in FOREIGN_NAMES:
        return FOREIGN_NAMES[leaf]
    same_name = [key for key in keys if key.rpartition(".")[2] == leaf]
    if not parent and same_name:
        return same_name[0]
    siblings = [key[len(prefix) :] for key in keys if key.startswith(prefix) and "." not in key[len(prefix) :]]
    if similar := nearest(leaf, siblings):
        return prefix + similar[0]
    if parent and parent not in keys and (inside := f"{nearest_key(parent)}.{leaf}") in keys:
        return inside
    return (same_name or nearest(dotted, keys) or [""])[0]
