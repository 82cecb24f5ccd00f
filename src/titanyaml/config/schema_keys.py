"""The keys of the schema, and the nearest one to what was typed."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from titanyaml.config import schema

#: What torchtitan, Megatron and Lightning call a key of ours.
ELSEWHERE = {
    "tensor_parallel_degree": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "context_parallel_degree": "parallel.cp",
    "context_parallel_size": "parallel.cp",
    "pipeline_parallel_degree": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "expert_parallel_degree": "parallel.ep",
    "expert_model_parallel_size": "parallel.ep",
    "data_parallel_shard_degree": "parallel.dp_shard",
    "data_parallel_replicate_degree": "parallel.dp_replicate",
    "fsdp": "parallel.dp_shard",
    "micro_batch_size": "train.local_batch",
}


@dataclass(frozen=True)
class Key:
    """One field of the schema.

    Args:
        name: of the field. kind: its type without ``| None``. optional: null is legal.
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
    hints = typing.get_type_hints(section)
    return {field.name: _key(field, hints[field.name]) for field in dataclasses.fields(section)}


def _key(field: dataclasses.Field, hint: Any) -> Key:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not type(None)]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    return Key(field.name, kinds[0], len(kinds) < len(members), default, field.metadata)


@cache
def all_keys(section: type = schema.Config, prefix: str = "") -> tuple[str, ...]:
    """All dotted keys, sections included."""
    found: list[str] = []
    for name, key in keys_of(section).items():
        found.append(prefix + name)
        if key.is_section:
            found += all_keys(key.kind, f"{prefix}{name}.")
    return tuple(found)


def find_key(dotted: str) -> Key | None:
    """The schema's field of that name, None where there is none; a key inside ``user`` finds ``user``."""
    section: Any = schema.Config
    key = None
    for name in dotted.split("."):
        if key is not None and not key.is_section:
            return key if key.kind == dict[str, Any] else None
        key = keys_of(section).get(name)
        if key is None:
            return None
        section = key.kind
    return key


def nearest(name: str, names: Iterable[str], *, count: int = 1) -> list[str]:
    """Names that begin with it, the shortest first, then the most similar, in capitals or not; empty where nothing is
    similar."""
    known = {one.casefold(): one for one in names}
    name = name.casefold()
    longer = sorted((one for one in known if len(name) > 2 and one.startswith(name)), key=len)
    near = longer + [one for one in difflib.get_close_matches(name, known, n=count, cutoff=0.6) if one not in longer]
    return [known[one] for one in near[:count]]


def nearest_key(dotted: str) -> str:
    """The schema's key that was probably meant, "" where nothing is near.

    First what other tools call so, then a similar name in the same section, then the same name in the section that was
    probably meant, then the same name anywhere (without a section: at once), then the most similar dotted key.
    """
    parent, _, leaf = dotted.rpartition(".")
    prefix = f"{parent}." if parent else ""
    known = all_keys()
    if leaf in ELSEWHERE:
        return ELSEWHERE[leaf]
    elsewhere = [key for key in known if key.rpartition(".")[2] == leaf]
    if not parent and elsewhere:
        return elsewhere[0]
    siblings = [key for key in known if key.startswith(prefix) and "." not in key[len(prefix) :]]
    if near := nearest(leaf, [key[len(prefix) :] for key in siblings]):
        return prefix + near[0]
    if parent and parent not in known and (inside := f"{nearest_key(parent)}.{leaf}") in known:
        return inside
    return (elsewhere or nearest(dotted, known) or [""])[0]
