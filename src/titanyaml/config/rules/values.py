"""A value against the choices and bounds of its key, for the check of a tree and for plugins built directly."""

from typing import Any

from titanyaml.config.scalar_types import describe
from titanyaml.config.schema_keys import Key, find_key, nearest
from titanyaml.errors import Problem

#: Larger integers overflow in torch, and lose digits in a float64.
_LARGEST_INT = 2**53


def check_values(section: str, **values: Any) -> list[Problem]:
    """Problems of values of one section that the schema excludes: ``check_values("ac", mode=..., every=...)``."""
    problems = []
    for name, value in values.items():
        path = f"{section}.{name}"
        key = find_key(path)
        assert key is not None, f"{path} is no key"
        if not (value is None and key.optional) and (refusal := check_value(key, value, path, value)):
            problems.append(refusal)
    return problems


def check_value(key: Key, value: Any, path: str, written: Any) -> Problem | None:
    """The problem of a value of the key's type that is not among its choices or within its bounds.

    Args:
        path: dotted name of the key. written: the value as the user wrote it.
    """
    message, allowed = f"is {written!r}", describe(key)
    choices = key.rules.get("choices")
    if choices and value not in choices:
        similar = nearest(str(value), map(str, choices))
        # a key inside a list cannot be typed
        hint = f"{path}={similar[0]}" if similar and "[" not in path else ""
        return Problem(path, message, allowed=allowed, hint=hint)
    low, high, above, below = (key.rules.get(bound) for bound in ("low", "high", "above", "below"))
    if high is None and isinstance(value, int) and abs(value) > _LARGEST_INT:
        return Problem(path, message, allowed=f"{allowed}, up to 2**53")
    if low is not None and value < low:
        return Problem(path, message, allowed=allowed, hint=f"{path}={low}")
    if high is not None and value > high:
        return Problem(path, message, allowed=allowed, hint=f"{path}={high}")
    if (above is not None and value <= above) or (below is not None and value >= below):
        return Problem(path, message, allowed=allowed)  # an open bound has no nearest legal value to suggest
    return None
