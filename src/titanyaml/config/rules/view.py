"""What a rule is, what it sees of a configuration, and how it spells a problem and the nearest legal values."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from titanyaml.errors import Problem

Check = Callable[[Any], Problem | None]


class Unknown(Exception):
    """A rule read a key that is absent, or has a problem of its own."""


class View:
    """Attribute access to a nested dict; reading what is absent raises Unknown.

    A rule cannot judge a value that is wrong by itself, so ``table.check_rules`` skips the rule on Unknown.
    """

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
        name: name of the check function. keys: keys or sections that it reads; its problem is about one of them.
        check: takes a View or a Config and returns the problem, or None.
    """

    name: str
    keys: tuple[str, ...]
    check: Check


class RuleTable(list[Rule]):
    """The rules of one topic. As a decorator it appends functions: ``@rule("train.seq_len", "model.max_seq_len")``."""

    def __call__(self, *keys: str) -> Callable[[Check], Check]:
        def append(check: Check) -> Check:
            self.append(Rule(check.__name__, keys, check))
            return check

        return append


def problem(key: str, message: str, allowed: str = "", *fixes: str, is_unread: bool = False) -> Problem:
    """A Problem whose hint offers each fix that is not empty."""
    return Problem(key, message, allowed=allowed, hint=" or ".join(filter(None, fixes)), is_unread=is_unread)


def offer_first(refusal: Problem, *fixes: str) -> Problem:
    """The same problem with these fixes before its own."""
    return replace(refusal, hint=" or ".join(filter(None, [*fixes, refusal.hint])))


def divisors(number: int) -> list[int]:
    """The positive divisors of a positive number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_numbers(value: int, legal: Iterable[int]) -> list[int]:
    """The nearest legal numbers below and above ``value``."""
    ascending = sorted(legal)
    below = [number for number in ascending if number < value][-1:]
    return below + [number for number in ascending if number > value][:1]


def settings(key: str, values: Iterable[Any]) -> str:
    """Alternatives for one key: ``key=a or key=b``."""
    return " or ".join(f"{key}={value}" for value in values)


def offer_nearest(key: str, value: int, legal: Iterable[int]) -> str:
    """``settings`` of the nearest legal numbers."""
    return settings(key, nearest_numbers(value, legal))


def multiples_around(value: int, unit: int) -> list[int]:
    """The nearest positive multiples of ``unit`` below and above a value that is not one itself."""
    below = value // unit * unit
    return [number for number in (below, below + unit) if number > 0]


def offer_multiples(key: str, value: int, unit: int) -> str:
    """``settings`` of the nearest positive multiples of ``unit``."""
    return settings(key, multiples_around(value, unit))
