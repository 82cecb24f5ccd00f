"""SIGTERM and SIGINT as a flag that loops poll, so that neither cuts a step or a checkpoint in two."""

import signal
from types import FrameType

_stop_signal: str | None = None


def install() -> None:
    """From now on SIGTERM and SIGINT only set the flag. Main thread only, as Python demands."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _remember)


def requested() -> str | None:
    """Name of the first signal that asked this process to stop, or None."""
    return _stop_signal


def reset() -> None:
    global _stop_signal
    _stop_signal = None


def _remember(number: int, frame: FrameType | None) -> None:
    global _stop_signal
    if _stop_signal is None:
        _stop_signal = signal.Signals(number).name
