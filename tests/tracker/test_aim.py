"""The Aim mirror: what is stored, and that no failure of Aim reaches training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from titanyaml.rundir import RunDir
from titanyaml.tracker.aim import AimMirror

ROOT = Path(__file__).parents[2]


class FakeRun(dict):
    """What the mirror uses of an Aim run."""

    hash = "f00d"
    repo = types.SimpleNamespace(is_remote_repo=True)

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()
        self.points = []
        self.closed = False

    def track(self, value, *, name, step, context) -> None:
        self.points.append((name, step, value, context["subset"]))

    def close(self) -> None:
        self.closed = True


def use(monkeypatch, run_class: type) -> list:
    """Put a fake Aim in place; the runs it makes."""
    aim_runs = []

    def make(*args, **kwargs):
        aim_runs.append(run_class(*args, **kwargs))
        return aim_runs[-1]

    monkeypatch.setitem(sys.modules, "aim", types.SimpleNamespace(Run=make))
    return aim_runs


def events(run: RunDir) -> list[dict]:
    path = run.path / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_names_steps_and_contexts(config, tmp_path, monkeypatch) -> None:
    aim_runs, run = use(monkeypatch, FakeRun), RunDir(tmp_path / "run")
    mirror = AimMirror(config, run)
    mirror.log({"step": 3, "loss": 1.5, "mfu": None, "note": "text", "tokens": 7, "validation_loss": 2.5})
    mirror.close("done")
    (aim_run,) = aim_runs
    assert aim_run.points == [("loss", 3, 1.5, "train"), ("tokens", 3, 7, "train"), ("loss", 3, 2.5, "validation")]
    assert aim_run.closed and aim_run["state"] == "done" and aim_run["train"]["steps"] == 40
    assert (run.path / "aim_run.txt").read_text() == "f00d\n" and events(run) == []


class RaisingTrack(FakeRun):
    def track(self, value, *, name, step, context) -> None:
        if step != 2:
            raise OSError("disk is gone")
        super().track(value, name=name, step=step, context=context)


class RaisingOpen(FakeRun):
    def __init__(self, *args, **kwargs) -> None:
        raise RuntimeError("no repository")


@pytest.mark.parametrize(
    "run_class, lost, text",
    [
        (RaisingTrack, 4, "failed at step 1: OSError: disk is gone"),
        (RaisingOpen, 5, "could not be opened: RuntimeError: no repository"),
    ],
)
def test_a_raising_aim_gives_one_warning_and_a_count(
    config, tmp_path, monkeypatch, caplog, run_class, lost, text
) -> None:
    use(monkeypatch, run_class)
    run = RunDir(tmp_path / "run")
    mirror = AimMirror(config, run)
    for step in range(1, 6):
        mirror.log({"step": step, "loss": 1.0})
    mirror.close("done")
    first, last = events(run)
    assert first["kind"] == "tracker_failed" and text in first["message"]
    assert last["kind"] == "tracker_incomplete" and (last["lost"], last["logged"]) == (lost, 5)
    assert caplog.text.count("training goes on") == 1


def test_a_raising_close_is_reported(config, tmp_path, monkeypatch) -> None:
    class RaisingClose(FakeRun):
        def close(self) -> None:
            raise OSError("lock")

    use(monkeypatch, RaisingClose)
    run = RunDir(tmp_path / "run")
    AimMirror(config, run).close("done")
    assert ["could not be closed" in event["message"] for event in events(run)] == [True]


@pytest.mark.parametrize("where", ["open", "track", "close"])
def test_a_hanging_aim_slows_nothing(config, tmp_path, monkeypatch, where: str) -> None:
    stuck = threading.Event()

    class Hanging(FakeRun):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__()
            if where == "open":
                stuck.wait()

        def track(self, *args, **kwargs) -> None:
            if where == "track":
                stuck.wait()

        def close(self) -> None:
            if where == "close":
                stuck.wait()

    use(monkeypatch, Hanging)
    run = RunDir(tmp_path / "run")
    mirror = AimMirror(config, run, capacity=100, close_s=0.5)
    started, worked = time.perf_counter(), time.thread_time()
    for step in range(1, 1001):
        mirror.log({"step": step, "loss": 1.0})
    logged, worked = time.perf_counter() - started, time.thread_time() - worked
    mirror.close("done")
    assert worked < 0.5 and logged < 5.0 and time.perf_counter() - started < 8.0
    kinds = [event["kind"] for event in events(run)]
    assert kinds.count("tracker_failed") == 1
    if where != "close":
        assert kinds == ["tracker_failed", "tracker_incomplete"] and events(run)[1]["lost"] == 1000
    stuck.set()


# --- with the real Aim ---


def query(repo: str, expression: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    import aim

    series = {}
    for collection in aim.Repo(repo).query_metrics(expression, report_mode=0).iter_runs():
        for metric in collection:
            steps, values = metric.values.sparse_numpy()[0], metric.values.sparse_numpy()[1]
            points = metric.dataframe()[["step", "value"]].itertuples(index=False)
            assert len(steps) == len(values)
            series[metric.name, metric.context["subset"]] = sorted((int(p.step), float(p.value)) for p in points)
    return series


def test_metrics_and_parameters_can_be_queried(config, tmp_path) -> None:
    pytest.importorskip("aim")
    run = RunDir(tmp_path / "run")
    mirror = AimMirror(config, run)
    for step in range(1, 6):
        record = {"step": step, "loss": step / 3, "tps": 10.0}
        mirror.log({**record, "validation_loss": 9.0} if step == 5 else record)
    mirror.close("done")
    assert events(run) == []
    losses = query(config.tracker.repo, "metric.name == 'loss' and run.model.dim == 64 and run.train.steps == 40")
    assert losses["loss", "train"] == [(step, step / 3) for step in range(1, 6)]
    assert losses["loss", "validation"] == [(5, 9.0)]
    expression = "run.experiment == 'exp' and run.name == 'run-1' and run['run']['seed'] == 0 and run.state == 'done'"
    assert set(query(config.tracker.repo, expression)) == {("loss", "train"), ("loss", "validation"), ("tps", "train")}
    assert query(config.tracker.repo, "run.model.dim == 65") == {}


def test_a_resumed_run_continues_and_replaces_steps(config, tmp_path) -> None:
    aim = pytest.importorskip("aim")
    run = RunDir(tmp_path / "run")
    for steps, loss in ((range(1, 7), 1.0), (range(4, 6), 2.0)):
        mirror = AimMirror(config, run)
        for step in steps:
            mirror.log({"step": step, "loss": loss})
        mirror.close("done")
    assert events(run) == []
    assert aim.Repo(config.tracker.repo).list_all_runs() == [(run.path / "aim_run.txt").read_text().strip()]
    # step 6 of the first attempt stays: Aim has no way to take it back
    assert query(config.tracker.repo, "metric.name == 'loss'")["loss", "train"] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 1.0),
    ]


KILLED = """
import json, sys, time
from titanyaml.config import schema
from titanyaml.rundir import RunDir
from titanyaml.tracker.aim import AimMirror
config = schema.Config()
config.run = schema.Run(name="exp", id=sys.argv[3], dir=sys.argv[1])
config.tracker = schema.Tracker(kind="aim", repo=sys.argv[2])
if sys.argv[4] == "hang":
    import aim
    aim.Run.track = lambda *args, **kwargs: time.sleep(3600)
mirror = AimMirror(config, RunDir(sys.argv[1]), close_s=0.5 if sys.argv[4] == "hang" else 15.0)
for step in range(1, 4):
    mirror.log({"step": step, "loss": float(step)})
while sys.argv[4] == "killed":
    if mirror.num_written == 3:
        print("written", flush=True)
        time.sleep(60)
    time.sleep(0.01)
mirror.close("done")
"""


def program(tmp_path: Path, name: str, how: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / name), str(tmp_path / "repo"), name, how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_run_is_continued(config, tmp_path) -> None:
    aim = pytest.importorskip("aim")
    process = program(tmp_path, "run", "killed")
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    run = RunDir(tmp_path / "run")
    mirror = AimMirror(config, run)
    mirror.log({"step": 4, "loss": 4.0})
    mirror.close("done")
    assert events(run) == [] and len(aim.Repo(config.tracker.repo).list_all_runs()) == 1
    assert query(config.tracker.repo, "metric.name == 'loss'")["loss", "train"] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.0),
    ]


def test_runs_that_create_one_repository_at_the_same_time(tmp_path) -> None:
    aim = pytest.importorskip("aim")
    names = ("a", "b", "c")
    for process in [program(tmp_path, name, "done") for name in names]:
        assert process.wait(60) == 0
        process.stdout.close()
    assert [events(RunDir(tmp_path / name)) for name in names] == [[], [], []]
    assert len(aim.Repo(str(tmp_path / "repo")).list_all_runs()) == 3
    assert all(query(str(tmp_path / "repo"), f"run.name == '{name}'") for name in names)


def test_a_hanging_aim_does_not_hang_exit(tmp_path) -> None:
    pytest.importorskip("aim")
    process = program(tmp_path, "run", "hang")
    assert process.wait(30) == 0
    process.stdout.close()
    assert [event["kind"] for event in events(RunDir(tmp_path / "run"))] == ["tracker_failed", "tracker_incomplete"]
