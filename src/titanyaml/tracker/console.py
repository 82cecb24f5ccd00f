"""Progress for people: a bar on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

#: The figures of a record that are shown, in this order, with units. metrics.jsonl has all of them.
SHOWN = {
    "loss": "loss {:.4f}",
    "validation_loss": "validation loss {:.4f}",
    "grad_norm": "grad norm {:.3f}",
    "lr": "lr {:.2e}",
    "tps": "{:,.0f} tokens/s/device",
    "tflops": "{:.2f} TFLOP/s",
    "mfu": "MFU {:.1%}",
    "mem_reserved_gib": "{:.2f} GiB reserved",
    "step_s": "{:.3f} s/step",
}
ON_BAR = ("loss", "validation_loss", "tps", "mfu")


def make_console(steps: int, *, out: TextIO | None = None) -> ProgressBar | PlainLines:
    """A bar where ``out`` (None: standard output) is a terminal, lines elsewhere."""
    out = out or sys.stdout
    return ProgressBar(steps, out=out) if out.isatty() else PlainLines(steps, out=out)


def describe(record: dict[str, Any], names: tuple[str, ...] = tuple(SHOWN)) -> str:
    """The figures of a record with units, separated by two blanks."""
    return "  ".join(SHOWN[name].format(record[name]) for name in names if record.get(name) is not None)


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 05 s``, ``2 h 10 min``."""
    minutes, spare = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{spare} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {spare:02d} s"


class _Console:
    """Base of both consoles: a terminal that goes away must not stop training."""

    _is_closed = False

    def _guarded(self, show: Callable[[], None]) -> None:
        try:
            if not self._is_closed:
                show()
        except (OSError, ValueError):  # closed pipe, closed file
            self._is_closed = True


class PlainLines(_Console):
    """One line per record, at most about one a second; first, last and validation records always."""

    INTERVAL_S = 1.0

    def __init__(self, steps: int, *, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.out, self.clock = steps, out, clock
        self._first: tuple[int, float] | None = None
        self._printed_at = float("-inf")
        self._skipped: dict[str, Any] | None = None  # the last record that came too soon

    def log(self, record: dict[str, Any]) -> None:
        seconds, step = self.clock(), record["step"]
        self._first = self._first or (step, seconds)
        if step >= self.steps or "validation_loss" in record or seconds - self._printed_at >= self.INTERVAL_S:
            self._guarded(lambda: self._print(record, seconds))
        else:
            self._skipped = record

    def close(self, state: str) -> None:
        # the last step of a run that ends early must be seen
        if (record := self._skipped) is not None:
            self._guarded(lambda: self._print(record, self.clock()))

    def _print(self, record: dict[str, Any], seconds: float) -> None:
        step, width = record["step"], len(str(self.steps))
        line = f"step {step:>{width}}/{self.steps}  {describe(record)}{self._eta(step, seconds)}"
        print(line, file=self.out, flush=True)  # flushed: a log file is read while the run goes on
        self._printed_at, self._skipped = seconds, None

    def _eta(self, step: int, seconds: float) -> str:
        """Time to the last step, at the pace since the first record, whose own step has a cold start."""
        first, started = self._first or (step, seconds)
        if step <= first or step >= self.steps:
            return ""
        return f"  {duration((seconds - started) / (step - first) * (self.steps - step))} left"


class _Terminal(Console):
    """Rich's console, which would end the program when the terminal goes away."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressBar(_Console):
    """One bar with pace, loss and remaining time; validation records stay as lines above it."""

    def __init__(self, steps: int, *, out: TextIO) -> None:
        self.steps = steps
        pace = TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None)
        text = TextColumn("{task.fields[figures]}"), TimeRemainingColumn(compact=True), TextColumn("left")
        self.progress = Progress(*pace, *text, console=_Terminal(file=out))
        self._task: TaskID | None = None

    def log(self, record: dict[str, Any]) -> None:
        self._guarded(lambda: self._show(record))

    def close(self, state: str) -> None:
        if self._task is not None:
            self._guarded(self.progress.stop)

    def _show(self, record: dict[str, Any]) -> None:
        if self._task is None:
            # a resumed run's earlier steps must not count as done at the present pace
            self._task = self.progress.add_task("", total=self.steps, completed=record["step"] - 1, figures="")
            self.progress.start()
        if "validation_loss" in record:
            self.progress.console.print(f"step {record['step']}/{self.steps}  {describe(record)}", highlight=False)
        if "loss" in record:
            self.progress.update(self._task, completed=record["step"], figures=describe(record, ON_BAR))
