"""Progress for people: a bar on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

#: What is shown of a record, in this order, with units. The rest is in metrics.jsonl.
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
    """The figures of a record, with units, apart by two blanks."""
    return "  ".join(SHOWN[name].format(record[name]) for name in names if record.get(name) is not None)


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 05 s``, ``2 h 10 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


class _Console:
    """What both kinds share: a terminal that goes away must not stop training."""

    def __init__(self) -> None:
        self._gone = False

    def _guarded(self, show: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            show()
        except (OSError, ValueError):  # closed pipe, closed file
            self._gone = True


class PlainLines(_Console):
    """One line a record, at most about one a second; first, last and validation records always.

    Args:
        steps: steps of the whole run.
        clock: seconds.
    """

    INTERVAL_S = 1.0

    def __init__(self, steps: int, *, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.steps, self.out, self.clock = steps, out, clock
        self._first: tuple[int, float] | None = None
        self._printed_at = float("-inf")
        self._held: dict[str, Any] | None = None  # a record that came too soon

    def log(self, record: dict[str, Any]) -> None:
        now, step = self.clock(), record["step"]
        self._first = self._first or (step, now)
        due = step >= self.steps or "validation_loss" in record or now - self._printed_at >= self.INTERVAL_S
        if due:
            self._guarded(lambda: self._print(record, now))
        else:
            self._held = record

    def close(self, state: str) -> None:
        if self._held is not None:
            held = self._held
            self._guarded(lambda: self._print(held, self.clock()))

    def _print(self, record: dict[str, Any], now: float) -> None:
        width = len(str(self.steps))
        line = f"step {record['step']:>{width}}/{self.steps}  {describe(record)}{self._left(record['step'], now)}"
        print(line, file=self.out, flush=True)
        self._printed_at, self._held = now, None

    def _left(self, step: int, now: float) -> str:
        """Time to the last step, at the pace since the first record."""
        first, started = self._first or (step, now)
        if step <= first or step >= self.steps:
            return ""
        return f"  {duration((now - started) / (step - first) * (self.steps - step))} left"


class _Terminal(Console):
    """Rich's console, without its habit of ending the program when the terminal goes away."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressBar(_Console):
    """One bar with pace, loss and the time that is left; validation records stay as lines above it.

    Args:
        steps: steps of the whole run.
    """

    def __init__(self, steps: int, *, out: TextIO) -> None:
        super().__init__()
        self.steps = steps
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=_Terminal(file=out),
        )
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
