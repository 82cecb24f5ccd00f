"""A request to stop, as a flag that loops poll: SIGTERM or SIGINT must not cut a step or a checkpoint in two."""

from __future__ import annotations

import signal
from types import FrameType

_asked: str | None = None


def install() -> None:
    """From now on SIGTERM and SIGINT only raise the flag. Main thread only, as Python demands."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _remember)


def requested() -> str | None:
    """The name of the signal that asked this process to stop, or None. The first one counts."""
    return _asked


def reset() -> None:
    """Forget a request."""
    global _asked
    _asked = None


def _remember(number: int, frame: FrameType | None) -> None:
    global _asked
    if _asked is None:
        _asked = signal.Signals(number).name
