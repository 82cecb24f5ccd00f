"""One owner at a time; records that survive what happens to their writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from titanyaml import rundir
from titanyaml.errors import EXIT_FAILED, LaunchError
from titanyaml.rundir import RunDir, atomic_write

CLAIM = """
import sys, time
from titanyaml.rundir import RunDir
print(RunDir(sys.argv[1]).claim(), flush=True)
sys.stdin.read()
"""


def owner(path: Path) -> subprocess.Popen:
    """A process that has claimed ``path`` and holds it until its stdin closes or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "1"
    return process


def test_a_living_owner_is_respected_and_a_dead_one_replaced_at_once(tmp_path: Path) -> None:
    owner_process = owner(tmp_path)
    run = RunDir(tmp_path)
    try:
        with pytest.raises(LaunchError) as refused:
            run.claim()
        assert str(owner_process.pid) in str(refused.value) and "run.id" in refused.value.hint
        assert refused.value.exit_code == EXIT_FAILED
        assert run.owner()["pid"] == owner_process.pid
    finally:
        owner_process.kill()
        owner_process.wait()
    assert run.owner() is None
    assert run.claim() == 2
    run.release()


def test_a_killed_but_unreaped_owner_is_dead(tmp_path: Path) -> None:
    owner_process = owner(tmp_path)
    owner_process.kill()
    os.waitid(os.P_PID, owner_process.pid, os.WEXITED | os.WNOWAIT)  # dead, still in the process table
    run = RunDir(tmp_path)
    assert run.claim() == 2
    run.release()
    owner_process.wait()


def test_another_process_with_the_owners_number_is_not_the_owner(tmp_path: Path) -> None:
    lease = {"host": os.uname().nodename, "pid": os.getpid(), "start_time": "1", "generation": 4}
    atomic_write(tmp_path / "lease.json", json.dumps(lease))
    run = RunDir(tmp_path)
    assert run.claim() == 5
    run.release()


def test_another_hosts_owner_counts_until_its_lease_stands_still(tmp_path: Path) -> None:
    lease = {"host": "elsewhere", "pid": 1, "start_time": "1", "generation": 1}
    atomic_write(tmp_path / "lease.json", json.dumps(lease))
    run = RunDir(tmp_path)
    with pytest.raises(LaunchError, match="elsewhere"):
        run.claim()
    old = (tmp_path / "lease.json").stat().st_mtime - rundir.STALE_S - 1
    os.utime(tmp_path / "lease.json", (old, old))
    assert run.claim() == 2
    run.release()


def test_the_owner_keeps_its_lease_fresh_and_never_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "HEARTBEAT_S", 0.02)
    run = RunDir(tmp_path)
    run.claim()
    lease = tmp_path / "lease.json"
    touched = threading.Event()
    os.utime(lease, (0, 0))
    for _ in range(100):
        if lease.stat().st_mtime > 0:
            break
        touched.wait(0.02)
    assert lease.stat().st_mtime > 0
    atomic_write(lease, json.dumps(json.loads(lease.read_text()) | {"generation": 9}))
    touched.wait(0.1)
    os.utime(lease, (0, 0))
    touched.wait(0.1)
    assert lease.stat().st_mtime == 0
    run.release()
    assert json.loads(lease.read_text())["generation"] == 9


def test_release_lets_the_next_one_in(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    assert first.claim() == 1
    with pytest.raises(LaunchError):
        RunDir(tmp_path).claim()
    first.release()
    second = RunDir(tmp_path)
    assert second.claim() == 2
    with pytest.raises(LaunchError, match="generation 2, this is 1"):
        first.check_generation()
    second.check_generation()
    second.check_generation(2)
    second.release()


def test_of_many_claimants_one_wins(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def attempt() -> None:
        try:
            RunDir(tmp_path).claim()
            outcomes.append("won")
        except LaunchError:
            outcomes.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 7 + ["won"]


def test_status_merges_and_none_removes(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    assert run.status() == {}
    run.write_status(state="running", error={"rank": 1})
    run.write_status(state="done", metric=1.5, error=None)
    assert {k: v for k, v in run.status().items() if k != "time"} == {"state": "done", "metric": 1.5}
    assert [path.name for path in run.path.iterdir()] == ["status.json"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic_write(tmp_path / "x", "old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(tmp_path / "x", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


def test_events_are_lines(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    run.event("warning", "one\ntwo", rank=3, step=7)
    run.event("checkpoint", "saved")
    first, second = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert (first["kind"], first["message"], first["rank"], first["step"]) == ("warning", "one\ntwo", 3, 7)
    assert (second["rank"], second["time"] >= first["time"]) == (0, True)


def test_metrics_after_the_resumed_step_go_and_a_torn_line_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.truncate_metrics(3) == 0
    assert not (tmp_path / "metrics.jsonl").exists()
    for step in range(1, 6):
        run.metric({"step": step, "loss": 1 / 3})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    assert run.truncate_metrics(3) == 2
    assert run.metrics() == [{"step": step, "loss": 1 / 3} for step in (1, 2, 3)]


@pytest.mark.parametrize("text", ["garbage", "", "[1]"])
@pytest.mark.parametrize("name", ["status.json", "lease.json"])
def test_a_record_that_somebody_spoiled_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    run = RunDir(tmp_path)
    with pytest.raises(LaunchError, match=f"{name} is not as it was written") as refused:
        run.claim()
        run.status()
    assert f"rm {tmp_path / name}" in refused.value.hint
    (tmp_path / name).unlink()
    assert run.claim() == 1 if name == "lease.json" else run.status() == {}
    run.release()
