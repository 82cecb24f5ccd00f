"""What to type for another value where other keys would then be read by nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from titanyaml.config import schema
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema_keys import keys_of


def switch(c: Any, way: str, **changed: Any) -> str:
    """``way`` (``ac=none``), and what sets the group's other keys back that nothing reads then (``ac.every=2``).

    Args:
        changed: keys of the group as ``way`` sets them.
    """
    group = way.partition("=")[0].partition(".")[0]
    back = find_group_resets(c, group, **changed)
    return " ".join([way, *(f"{group}.{name}={spell(value)}" for name, value in back.items())])


def find_group_resets(c: Any, group: str, **changed: Any) -> dict[str, Any]:
    """Keys of the group, with their defaults, that nothing reads once others are as in ``changed``."""
    keys, section = keys_of(keys_of(schema.Config)[group].kind), getattr(c, group)
    there = vars(section) if is_dataclass(section) else set(section)
    values = {name: changed.get(name, getattr(section, name)) for name in keys if name in there}
    return find_resets(keys, values, changed)


def find_resets(keys: dict[str, Any], values: dict[str, Any], changed: Iterable[str]) -> dict[str, Any]:
    """Of a section's ``values`` those, with their defaults, that nothing reads any more because of the ``changed``
    ones; and those that nothing reads because of these, and so on."""
    values, back = dict(values), {}
    while unread := next(
        (
            name
            for name in values
            if _is_unread(keys[name], values) and keys[name].rules["when"][0] in (*changed, *back)
        ),
        None,
    ):
        values[unread] = back[unread] = keys[unread].default
    return back


def _is_unread(key: Any, values: dict[str, Any]) -> bool:
    """As ``check.check_when`` has it; a default that is a reference is never typed over."""
    sibling, needed = key.rules.get("when") or ("", [])
    written = not isinstance(key.default, str) or "${" not in key.default
    return sibling in values and values[sibling] not in needed and written and values[key.name] != key.default
