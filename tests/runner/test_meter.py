"""The parts of a start add up to the time that it took."""

from __future__ import annotations

import time

import pytest

from titanyaml import machine
from titanyaml.runner import meter


def test_laps_add_up(monkeypatch) -> None:
    monkeypatch.setattr(machine, "process_age_s", lambda: 2.0)
    clock = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    laps = meter.StartupClock()
    for part, seconds in (("data", 1.0), ("materialise", 0.5), ("first_step", 20.0), ("data", 0.25)):
        clock[0] += seconds
        laps.lap(part)
    assert laps.record() == {"total": 23.75, "import": 2.0, "data": 1.25, "materialise": 0.5, "first_step": 20.0}
    assert laps.sentence() == ("first step done after 23.8 s: import 2.0, data 1.2, materialise 0.5, first step 20.0")
    with pytest.raises(AssertionError):
        laps.lap("lunch")
