"""What a rule is, what it sees of a tree, and how it spells the nearest legal values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.errors import Problem

Check = Callable[[Any], Problem | None]


class Unknown(Exception):
    """A key that has a problem of its own, or is absent, was read."""


class View:
    """Attribute access to a nested dict; reading what is not there raises Unknown."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise Unknown(name)
        return _wrap(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


def _wrap(value: Any) -> Any:
    if isinstance(value, dict):
        return View(value)
    return [_wrap(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Args:
        name: the function's. keys: what it reads. check: the problem of a View, or None.
    """

    name: str
    keys: tuple[str, ...]
    check: Check


def into(table: list[Rule]) -> Callable[..., Callable[[Check], Check]]:
    """A decorator that adds functions to a table: ``@rule("train.seq_len", "model.max_seq_len")``."""

    def rule(*keys: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            table.append(Rule(check.__name__, keys, check))
            return check

        return add

    return rule


def multiples_around(value: int, unit: int) -> list[int]:
    """The nearest positive multiples of ``unit`` below and above a value that is none."""
    below = value // unit * unit
    return [number for number in (below, below + unit) if number > 0]


def nearest_numbers(value: int, legal: Iterable[int]) -> list[int]:
    """The nearest legal numbers on both sides."""
    legal = sorted(legal)
    below = [number for number in legal if number < value][-1:]
    return below + [number for number in legal if number > value][:1]


def ways(key: str, values: Iterable[Any]) -> str:
    """``key=a or key=b``."""
    return " or ".join(f"{key}={value}" for value in values)
