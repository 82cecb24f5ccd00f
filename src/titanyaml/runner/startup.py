"""Where the time goes from the start of a rank to the end of its first step."""

from __future__ import annotations

import time

from titanyaml import machine

#: In the order in which they come; ``other``: optimizer, checkpoint, comparison of copies, trackers.
PARTS = ("import", "ceilings", "data", "build", "materialise", "other", "first_step")


class Startup:
    """Laps: each call of ``lap`` gives the time since the one before to a part.

    ``import`` is what was before: the interpreter, libraries, joining the group. ``first_step`` includes compilation.
    """

    def __init__(self) -> None:
        self.parts = {"import": machine.process_age_s()}
        self._at = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last lap was ``part``'s (one of PARTS)."""
        assert part in PARTS, part
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._at
        self._at = now

    def record(self) -> dict[str, float]:
        """Seconds by part, and ``total``."""
        return {"total": sum(self.parts.values()), **{name: self.parts[name] for name in PARTS if name in self.parts}}

    def sentence(self) -> str:
        """For the log."""
        total, *parts = self.record().items()
        listed = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in parts)
        return f"first step done after {total[1]:.1f} s: {listed}"
