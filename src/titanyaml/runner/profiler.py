"""Traces and memory snapshots of a run's steps, on a schedule (``profile=trace|memory|both``).

Files: ``<run>/profile/trace-step-<last step>-rank-<rank>.json.gz`` and ``memory-step-...-rank-<rank>.pickle``.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from titanyaml.config import schema
from titanyaml.distributed import compat
from titanyaml.distributed.env import Env
from titanyaml.rundir import RunDir

log = logging.getLogger("titanyaml")


class Profiler:
    """Records on a schedule; does nothing on a rank that is not in ``profile.ranks``."""

    def __init__(self, spec: schema.Profile, run: RunDir, env: Env) -> None:
        self.run, self.env, self.last_step = run, env, 0
        records = env.rank in spec.ranks
        windows = schedule(wait=spec.wait, warmup=spec.warmup, active=spec.active, repeat=spec.repeat)
        self.trace: profile | None = None
        self.memory: _MemoryHistory | None = None
        if records and spec.kind in ("trace", "both"):
            self.trace = profile(
                activities=activities(env.device),
                schedule=windows,
                record_shapes=spec.shapes,
                with_stack=spec.stacks,
                on_trace_ready=lambda trace: trace.export_chrome_trace(str(self._file("trace", "json.gz"))),
            )
            self.trace.start()
        if records and spec.kind in ("memory", "both"):
            self.memory = _MemoryHistory(
                windows,
                max_entries=spec.max_allocations,
                dump=lambda: compat.dump_memory_snapshot(self._file("memory", "pickle")),
            )

    def step(self, step: int) -> None:
        """Step ``step`` of the run is finished."""
        self.last_step = step
        if self.trace is not None:
            self.trace.step()
        if self.memory is not None:
            self.memory.step()

    def close(self) -> None:
        """Write what an open window holds; after an out-of-memory error that is its history."""
        # forgotten first: a second close, after writing has failed, must not try again
        trace, memory, self.trace, self.memory = self.trace, self.memory, None, None
        if trace is not None:
            trace.stop()
        if memory is not None:
            memory.stop()

    def _file(self, kind: str, suffix: str) -> Path:
        path = self.run.path / "profile" / f"{kind}-step-{self.last_step:08d}-rank-{self.env.rank}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        log.info("profile: %s", path)
        self.run.event("profile", str(path.relative_to(self.run.path)), rank=self.env.rank, step=self.last_step)
        return path


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What a trace records: the host's operators and, on a GPU, its kernels."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


class _MemoryHistory:
    """The allocator's history, under a trace's schedule: ``windows`` maps the number of past steps to an action.

    torch's profiler has no schedule for this history; here it follows the same windows as the trace.
    """

    def __init__(self, windows: Callable[[int], ProfilerAction], *, max_entries: int, dump: Callable[[], None]) -> None:
        self.windows, self.max_entries, self.dump = windows, max_entries, dump
        self.steps, self.recording = 0, False
        self._begin()

    def _begin(self) -> None:
        is_active = self.windows(self.steps) in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        if is_active and not self.recording:
            compat.record_memory_history(self.max_entries)
            self.recording = True

    def step(self) -> None:
        """A step is finished."""
        if self.windows(self.steps) == ProfilerAction.RECORD_AND_SAVE:
            self.stop()
        self.steps += 1
        self._begin()

    def stop(self) -> None:
        """Write what was recorded, if anything was, and stop recording."""
        if self.recording:
            # written before it is stopped: stopping forgets it
            self.dump()
            compat.record_memory_history(None)
            self.recording = False
