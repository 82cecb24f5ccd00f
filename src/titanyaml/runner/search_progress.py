"""How far a search is, on standard error: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from titanyaml.planner.search.search import Result

#: Seconds between two lines, and between two changes of the one line.
_LINES, _CHANGES = 5.0, 0.25


class Progress:
    """Shown no more often than every few seconds; a search that is shorter says nothing in lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status = Status("search", console=self._console) if self._console.is_terminal else None
        self._begun = self._told = time.monotonic()

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._status:
            self._status.stop()

    def tell(self, result: Result) -> None:
        """What a search is at, where it is time to say so."""
        now = time.monotonic()
        if now - self._told < (_CHANGES if self._status else _LINES):
            return
        self._told = now
        text = describe(result, seconds=now - self._begun)
        if self._status:
            self._status.update(Text(text))
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(result: Result, *, seconds: float) -> str:
    """One line."""
    text = f"search, {seconds:.0f} s, {result.doing}: {result.tried:,} tried, {result.fitted:,} fit"
    if result.best:
        first = result.best[0]
        text += f", best so far {first.plan.tps:,.0f} tokens/s: {first.change}"
    return text
