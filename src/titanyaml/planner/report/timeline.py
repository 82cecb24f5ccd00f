"""timeline.json: one microbatch of the slowest rank, as ui.perfetto.dev and chrome://tracing read it."""

from __future__ import annotations

from typing import Any

from titanyaml.planner.model.step import Step

_STREAMS = {"compute": 1, "network": 2}


def trace_events(step: Step) -> dict[str, Any]:
    """Complete events ("X"), times in microseconds; what the compute stream waits for has no event."""
    names = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": stream}}
        for stream, tid in _STREAMS.items()
    ]
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": _STREAMS[event.stream],
            "name": event.name,
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
        }
        for event in step.events
        if event.seconds > 0
    ]
    process = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "one microbatch, slowest rank"}}
    return {"traceEvents": [process, *names, *events], "displayTimeUnit": "ms"}
