"""How a configuration key is written: its default, one line about it, and what the whole-tree check enforces.

``key(...)`` attaches what ``config/tree_check.py`` enforces beyond the type: legal choices, the range, and ``when``:
the sibling key and the values for which this key is read at all. A key set to something other than its default while its
``when`` does not hold is refused: nothing that was typed is ignored.

No tuples, no enums: OmegaConf 2.3 and 2.4 treat them differently.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

MISSING = "???"
MAX_RANKS = 2**20


def key(
    default: Any,
    doc: str,
    *,
    choices: list | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    when: tuple[str, list] | None = None,
) -> Any:
    """A configuration key.

    Args:
        default: its default (lists and dicts are copied).
        doc: one line: meaning, unit, what the default does.
        choices: the only legal values.
        low, high: inclusive bounds. above, below: exclusive bounds.
        when: (sibling key, values of it for which this key is read).
    """
    metadata = {"doc": doc, "choices": choices, "low": low, "above": above, "high": high, "below": below, "when": when}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
