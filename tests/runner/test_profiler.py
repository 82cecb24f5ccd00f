"""Traces and snapshots come when the schedule says, from the ranks that were named."""

from __future__ import annotations

import gzip
import json
import logging

import pytest
import torch

from titanyaml.config import schema
from titanyaml.distributed import compat
from titanyaml.distributed.env import Env
from titanyaml.rundir import RunDir
from titanyaml.runner.profiler import Profiler


def env(rank: int = 0) -> Env:
    return Env(rank, 2, rank, torch.device("cpu"), "gloo")


def files(run: RunDir) -> list[str]:
    return sorted(path.name for path in (run.path / "profile").glob("*"))


def test_traces_of_two_windows_and_of_what_is_left(tmp_path, caplog):
    caplog.set_level(logging.INFO, "titanyaml")
    run = RunDir(tmp_path)
    profiler = Profiler(schema.Profile(kind="trace", wait=1, warmup=1, active=1, repeat=0), run, env())
    for step in range(11, 19):
        torch.ones(2).add_(step)
        profiler.step(step)
    profiler.close()
    names = [f"trace-step-{step:08d}-rank-0.json.gz" for step in (13, 16)]
    assert files(run)[:2] == names
    events = json.loads(gzip.decompress((tmp_path / "profile" / names[0]).read_bytes()))["traceEvents"]
    assert [event["name"] for event in events].count("aten::add_") == 1, "the active step alone"
    recorded = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in recorded][:2] == [("profile", 13), ("profile", 16)]


@pytest.mark.parametrize(("kind", "rank"), [("none", 0), ("trace", 1)])
def test_nothing_on_other_ranks(tmp_path, kind, rank):
    profiler = Profiler(schema.Profile(kind=kind, wait=0, warmup=0, active=1), RunDir(tmp_path), env(rank))
    profiler.step(1)
    profiler.close()
    assert not (tmp_path / "profile").exists()


def test_snapshots_follow_the_same_schedule(tmp_path, monkeypatch):
    calls: list = []
    monkeypatch.setattr(compat, "record_memory_history", calls.append)
    monkeypatch.setattr(compat, "dump_memory_snapshot", lambda path: calls.append(path.name))
    spec = schema.Profile(kind="memory", wait=1, warmup=1, active=2, repeat=2, max_allocations=7)
    profiler = Profiler(spec, RunDir(tmp_path), env())
    for step in range(1, 8):
        assert calls == [[], [], [7], [7]][step - 1] if step < 5 else True
        profiler.step(step)
    assert calls == [7, "memory-step-00000004-rank-0.pickle", None, 7]
    profiler.close()  # as after an error in step 8
    assert calls[4:] == ["memory-step-00000007-rank-0.pickle", None]
