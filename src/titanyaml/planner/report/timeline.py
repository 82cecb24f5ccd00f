"""timeline.json: one microbatch of the slowest rank, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from typing import Any

from titanyaml.planner.model.step import Step

_STREAMS = {"compute": 1, "network": 2}  # thread ids of the trace


def trace_events(step: Step) -> dict[str, Any]:
    """The trace. Waits of the compute stream have no event of their own: they are its gaps."""
    process = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "one microbatch, slowest rank"}}
    threads = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": stream}}
        for stream, tid in _STREAMS.items()
    ]
    events = [
        # "X": a complete event; times in microseconds
        {"ph": "X", "pid": 0, "tid": _STREAMS[event.stream], "name": event.name}
        | {"ts": event.start * 1e6, "dur": event.seconds * 1e6}
        for event in step.events
        if event.seconds > 0
    ]
    return {"traceEvents": [process, *threads, *events], "displayTimeUnit": "ms"}
