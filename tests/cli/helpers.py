"""Reading what a run left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


def starts(run: Path) -> int:
    """How many ranks have begun to train in ``run``, over all attempts."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return len([line for line in lines if json.loads(line)["kind"] == "started"])


def status(run: Path) -> dict:
    """status.json of ``run``."""
    return json.loads((run / "status.json").read_text())


def steps(run: Path) -> list[int]:
    """The logged steps."""
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], *, seconds: float = 90.0) -> None:
    """Poll until ``condition`` holds; fail when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
