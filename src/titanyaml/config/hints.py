"""What to type for another value where other keys would then be read by nothing."""

from __future__ import annotations

from typing import Any

from titanyaml.config import schema
from titanyaml.config.kinds import spell
from titanyaml.config.nearest import keys_of


def switch(c: Any, way: str, **changed: Any) -> str:
    """``way`` (``ac=none``), and what sets the group's other keys back that nothing reads then (``ac.every=2``).

    Args:
        changed: keys of the group as ``way`` sets them.
    """
    group = way.partition("=")[0].partition(".")[0]
    keys, section = keys_of(keys_of(schema.Config)[group].kind), getattr(c, group)
    values = {name: changed.get(name, getattr(section, name)) for name in keys if name in list(section)}
    ways = [way]
    while unread := next((name for name in values if _is_unread(keys[name], values)), None):
        values[unread] = keys[unread].default
        ways.append(f"{group}.{unread}={spell(values[unread])}")
    return " ".join(ways)


def _is_unread(key: Any, values: dict[str, Any]) -> bool:
    """As ``check.check_when`` has it; a default that is a reference is never typed over."""
    sibling, needed = key.rules.get("when") or ("", [])
    written = not isinstance(key.default, str) or "${" not in key.default
    return sibling in values and values[sibling] not in needed and written and values[key.name] != key.default
