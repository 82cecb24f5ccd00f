"""Where the time goes from the start of a rank's process to the end of its first step."""

from __future__ import annotations

import time

from titanyaml import machine

#: In their order. ``other``: optimizer, checkpoint, comparison of replicas, trackers.
PARTS = ("import", "ceilings", "data", "build", "materialise", "other", "first_step")


class StartupClock:
    """A stopwatch with laps: each ``lap`` books the time since the previous one under a part of the start.

    ``import`` is the age of the process when this object is made: interpreter, libraries, joining the process group.
    ``first_step`` includes compilation.
    """

    def __init__(self) -> None:
        self.parts = {"import": machine.process_age_s()}
        self._last_lap = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last lap under ``part``, one of PARTS; a part may have several laps."""
        assert part in PARTS, part
        lap_end = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + lap_end - self._last_lap
        self._last_lap = lap_end

    def record(self) -> dict[str, float]:
        """Seconds by part, and ``total``."""
        return {"total": sum(self.parts.values()), **{name: self.parts[name] for name in PARTS if name in self.parts}}

    def sentence(self) -> str:
        """One line for the log."""
        (_, total), *parts = self.record().items()
        listed = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in parts)
        return f"first step done after {total:.1f} s: {listed}"
