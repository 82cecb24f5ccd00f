"""How a configuration key is declared: its default, its documentation, and what the checks enforce.

``key(...)`` stores the metadata in the dataclass field. ``config/tree_check.py`` enforces choices, range and ``when``;
``launch/resume.py`` reads ``resume``. A key set to something other than its default while its ``when`` does not hold
is refused, so that nothing the user typed is ignored.
"""

from dataclasses import field
from typing import Any

MISSING = "???"  # OmegaConf's mark of a required value
MAX_RANKS = 2**20


# No tuples and no enums in the schema: OmegaConf 2.3 and 2.4 treat them differently.
def key(
    default: Any,
    doc: str,
    *,
    choices: list[Any] | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    when: tuple[str, list[Any]] | None = None,
    resume: str | None = None,
) -> Any:
    """A configuration key.

    Args:
        default: its default; lists and dicts are copied, a class is called.
        doc: one line: meaning, unit, what the default does.
        choices: the only legal values.
        low, high: inclusive bounds. above, below: exclusive bounds.
        when: (sibling key, values of it for which this key is read).
        resume: whether a resumed run may have another value. ``free``: yes. ``equal_batch``: as long as a step sees
            equally many sequences. ``fixed``: never. None: only if ``checkpoint.accept_changes`` names it. On a section
            it holds for all its keys.
    """
    metadata: dict[str, Any] = {"doc": doc, "choices": choices, "when": when, "resume": resume}
    metadata |= {"low": low, "above": above, "high": high, "below": below}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
