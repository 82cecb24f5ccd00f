"""Experiment tracking: where the records of a run go. Built on the main rank only.

``metrics.jsonl`` is the record and is written first; console and Aim mirror it and may fail without harm.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from titanyaml.config.schema import Config
from titanyaml.rundir import RunDir
from titanyaml.tracker.aim import AimMirror
from titanyaml.tracker.console import make_console

__all__ = ["Trackers", "build"]


class Sink(Protocol):
    """One mirror of the records."""

    def log(self, record: dict[str, Any]) -> None:
        """Take a record; must not raise and must not wait."""

    # whatever is unwritten has to be written in ``close``: a rank leaves by os._exit, which waits for no thread
    def close(self, state: str) -> None:
        """Take the run's last state: "done", "failed", "preempted" or "stopped"; must return soon and not raise."""


class Trackers:
    """All sinks of a run, behind one ``log``; ``metrics.jsonl`` of ``run`` comes first."""

    def __init__(self, run: RunDir, mirrors: Sequence[Sink] = ()) -> None:
        self.run, self.mirrors = run, list(mirrors)

    def log(self, record: dict[str, Any]) -> None:
        """Write one record: ``step`` and the figures of that step, without rounding."""
        self.run.metric(record)  # first: it must not depend on a mirror
        for mirror in self.mirrors:
            mirror.log(record)

    def close(self, state: str) -> None:
        for mirror in self.mirrors:
            mirror.close(state)


def build(config: Config, run: RunDir, *, console: bool = True) -> Trackers:
    """The trackers that ``config`` asks for, and progress on standard output; ConfigError if Aim is not installed."""
    mirrors: list[Sink] = [make_console(config.train.steps)] if console else []
    if config.tracker.kind == "aim":
        mirrors.append(AimMirror(config, run))
    return Trackers(run, mirrors)
