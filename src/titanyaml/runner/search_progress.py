"""How far a search is, on standard error: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from titanyaml.planner.search.fastest import SearchResult

#: Seconds between two plain lines, and between two changes of the one line.
_LINE_S, _CHANGE_S = 5.0, 0.25


class ProgressLine:
    """A context in which ``show`` may be called thousands of times; it prints every few seconds."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status = Status("search", console=self._console) if self._console.is_terminal else None
        self._begin = self._last_shown = time.monotonic()

    def __enter__(self) -> ProgressLine:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._status:
            self._status.stop()

    def show(self, result: SearchResult) -> None:
        """Print what the search is at, if the last time is long enough ago."""
        seconds = time.monotonic()
        # a search may call this thousands of times a second
        if seconds - self._last_shown < (_CHANGE_S if self._status else _LINE_S):
            return
        self._last_shown = seconds
        text = describe(result, seconds=seconds - self._begin)
        if self._status:
            self._status.update(Text(text))
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(result: SearchResult, *, seconds: float) -> str:
    """One line."""
    text = f"search, {seconds:.0f} s, {result.phase}: {result.tried:,} tried, {result.fitted:,} fit"
    if result.best:
        first = result.best[0]
        text += f", best so far {first.plan.tps:,.0f} tokens/s: {first.overrides}"
    return text
