"""Overrides that a hint offers, with resets of keys that only applied to the old value.

A key that nothing reads may not differ from its default (``tree_check``). So ``ac=none`` alone is refused where
``ac.every=3`` was typed: the hint has to be ``ac=none ac.every=2``.
"""

from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from titanyaml.config import schema
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema_keys import Key, keys_of


def with_resets(c: Any, override: str, **changed: Any) -> str:
    """``override`` (``ac=none``), and resets of the group's keys that nothing reads after it.

    Args:
        changed: keys of the group as ``override`` sets them.
    """
    group = override.partition("=")[0].partition(".")[0]
    resets = find_group_resets(c, group, **changed)
    return " ".join([override, *(f"{group}.{name}={spell(value)}" for name, value in resets.items())])


def find_group_resets(c: Any, group: str, **changed: Any) -> dict[str, Any]:
    """Defaults by name of the group's keys that nothing reads once its other keys are ``changed``."""
    keys, section = keys_of(keys_of(schema.Config)[group].kind), getattr(c, group)
    present = vars(section) if is_dataclass(section) else set(section)
    values = {name: changed.get(name, getattr(section, name)) for name in keys if name in present}
    return find_resets(keys, values, changed)


def find_resets(keys: dict[str, Key], values: dict[str, Any], changed: Iterable[str]) -> dict[str, Any]:
    """Defaults by name of the keys of a section that nothing reads because of the ``changed`` ones, in turn.

    Args:
        values: of the section, with the changed ones.
    """
    values, resets = dict(values), dict[str, Any]()

    def next_unread() -> str | None:
        causes = {*changed, *resets}
        return next((name for name in values if _is_unread(keys[name], values, causes)), None)

    while unread := next_unread():  # a reset may leave further keys unread
        values[unread] = resets[unread] = keys[unread].default
    return resets


def _is_unread(key: Key, values: dict[str, Any], causes: set[str]) -> bool:
    """Whether a cause leaves this key unread, as ``tree_check`` has it, with a value that is not its default."""
    sibling, readers = key.rules.get("when") or ("", [])
    # a default that refers to another key is not typed over: the hint would lose the reference
    is_literal = not isinstance(key.default, str) or "${" not in key.default
    is_unread = sibling in causes and sibling in values and values[sibling] not in readers
    return is_unread and is_literal and values[key.name] != key.default


def reset_nproc(c: Any) -> str:
    """`` launch.nproc=null`` where a number of ranks was typed that another mesh would contradict, else ""."""
    return "" if c.launch.nproc is None else " launch.nproc=null"


def use_one_rank(c: Any) -> str:
    """The override for a run on one rank."""
    return "parallel=single" if c.launch.nproc is None else "parallel=single launch.nproc=1"
