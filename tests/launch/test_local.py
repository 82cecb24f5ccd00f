"""Exit codes, the earliest error, grace and the absence of orphans, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from titanyaml import machine
from titanyaml.config import schema
from titanyaml.errors import EXIT_CONFIG, EXIT_DATA, EXIT_FAILED, EXIT_NON_FINITE, EXIT_PREEMPTED, LaunchError
from titanyaml.launch import local
from titanyaml.rundir import RunDir, process_start

from .conftest import REPOSITORY

MakeRun = Callable[..., RunDir]


def start(run: RunDir, *, nproc: int = 2, grace_s: float = 60.0) -> local.Outcome:
    return local.launch(run, run_id="i", nproc=nproc, launch=schema.Launch(shutdown_grace_s=grace_s))


def events(run: RunDir) -> list[dict]:
    path = run.path / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def started(run: RunDir, ranks: int = 2) -> bool:
    return len([event for event in events(run) if event["kind"] == "started"]) == ranks


def signal_when(run: RunDir, condition: Callable[[], bool], *numbers: int) -> threading.Thread:
    def send() -> None:
        wait_for(condition)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_two_ranks_run_and_their_result_is_recorded(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = make_run(steps=2)
    outcome = start(run)
    assert (outcome.exit_code, outcome.state, outcome.failure) == (0, "done", None)
    status = run.status()
    assert (status["state"], status["exit_code"], status["ranks"], status["metric"]) == ("done", 0, 2, 3e-4)
    assert [record["step"] for record in run.metrics()] == [1, 2]
    assert {event["threads"] for event in events(run)} == {str(max(1, machine.cores() // 2))}
    assert {event["rank"] for event in events(run)} == {0, 1}


@pytest.mark.parametrize(
    ("user", "code", "message"),
    [
        ({"fail": "error", "rank": 1}, EXIT_FAILED, "the roof is leaking"),
        ({"fail": "data", "rank": 0}, EXIT_DATA, "corpus.txt is missing"),
        ({"fail": "non_finite", "rank": 1}, EXIT_NON_FINITE, "loss is nan"),
        ({"fail": "kill", "rank": 1}, EXIT_FAILED, "SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_which_failed_first(
    make_run: MakeRun, user: dict, code: int, message: str
) -> None:
    outcome = start(make_run(user=user))
    assert (outcome.exit_code, outcome.state) == (code, "failed")
    assert outcome.failure.rank == user["rank"]
    assert message in outcome.failure.text()
    # an error that explains itself has no traceback, a surprise has one
    assert ("standins.py" in outcome.failure.text()) == (user["fail"] == "error")


def test_a_peer_that_cannot_notice_is_ended_soon(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PEER_GRACE_S", 1.0)
    run = make_run(target="hang_in_collective")
    outcome = start(run)
    ended = time.time()
    assert (outcome.exit_code, outcome.failure.rank, outcome.failure.type) == (EXIT_FAILED, 1, "RuntimeError")
    assert ended - outcome.failure.time < 15


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]], ids=["once", "twice"])
def test_sigterm_lets_the_ranks_save_and_exit_75(make_run: MakeRun, signals: list[int]) -> None:
    # the second signal must find the ranks in their step: this process would die of it once the launch is over
    run = make_run(steps=2000, user={"step_s": 3.0 if len(signals) > 1 else 0.02})
    thread = signal_when(run, lambda: bool(run.metrics()), *signals)
    outcome = start(run)
    thread.join()
    assert (outcome.exit_code, outcome.state, outcome.signal) == (EXIT_PREEMPTED, "preempted", "SIGTERM")
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("preempted", EXIT_PREEMPTED)
    assert "asked to stop" in status["reason"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_deaf_rank_is_killed_after_the_grace(make_run: MakeRun) -> None:
    run = make_run(user={"fail": "deaf"})
    thread = signal_when(run, lambda: started(run), signal.SIGTERM)
    outcome = start(run, grace_s=1.0)
    thread.join()
    assert (outcome.exit_code, outcome.state) == (EXIT_FAILED, "failed")
    assert "launch.shutdown_grace_s" in outcome.failure.message


def test_a_second_signal_does_not_wait(make_run: MakeRun) -> None:
    run = make_run(user={"fail": "deaf"})
    thread = signal_when(run, lambda: started(run), signal.SIGINT, signal.SIGINT)
    outcome = start(run, grace_s=600.0)
    thread.join()
    assert (outcome.exit_code, outcome.state, outcome.signal) == (EXIT_FAILED, "stopped", "SIGINT")


def test_a_signal_before_the_ranks_listen_stops_them(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(steps=1)
    spawn = subprocess.Popen

    def spawn_and_signal(*args: object, **kwargs: object) -> subprocess.Popen:
        process = spawn(*args, **kwargs)
        os.kill(process.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", spawn_and_signal)
    outcome = start(run, nproc=1)
    assert (outcome.exit_code, outcome.state) == (EXIT_PREEMPTED, "stopped")


LAUNCH = """
import sys
from titanyaml.config import schema
from titanyaml.launch import local
from titanyaml.rundir import RunDir
run = RunDir(sys.argv[1])
run.claim()
local.launch(run, run_id="i", nproc=2, launch=schema.Launch())
"""


def test_kill_9_of_the_parent_leaves_no_rank_behind(make_run: MakeRun) -> None:
    run = make_run(steps=2000, user={"step_s": 0.02})
    run.release()
    parent = subprocess.Popen([sys.executable, "-c", LAUNCH, str(run.path)], cwd=REPOSITORY)
    wait_for(lambda: len(run.metrics()) > 1)
    pids = [event["pid"] for event in events(run) if event["kind"] == "started"]
    assert len(pids) == 2
    assert all(process_start(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(process_start(pid) for pid in pids), seconds=10)
    written = len(run.metrics())
    time.sleep(0.3)
    assert len(run.metrics()) == written
    assert run.claim() >= 3  # the folder is free at once


def test_what_a_rank_left_behind_ends_with_it(make_run: MakeRun) -> None:
    run = make_run(target="leave_a_child")
    assert start(run, nproc=1).exit_code == 0
    assert [event["kind"] for event in events(run)][-2:] == ["child", "exit"]
    (child,) = [event["pid"] for event in events(run) if event["kind"] == "child"]
    wait_for(lambda: not process_start(child), seconds=10)


@pytest.mark.parametrize(("user", "told"), [({}, "done [1]"), ({"fail": "log"}, "failed [1]")])
def test_what_a_tracker_does_at_its_close_is_done_when_the_rank_ends(make_run: MakeRun, user: dict, told: str) -> None:
    run = make_run(target="track_slowly", user=user)
    start(run, nproc=1)
    assert (run.path / "slow.txt").read_text() == told


def test_a_rank_whose_launcher_is_gone_does_not_start(make_run: MakeRun) -> None:
    run = make_run()
    command = [
        sys.executable,
        "-m",
        "titanyaml.launch.rank",
        "--run-dir",
        str(run.path),
        "--run-id",
        "i",
        "--generation",
        "1",
        "--parent",
        "1",
    ]
    result = subprocess.run(command, env=local.rank_environment(0, nproc=1, port=1), timeout=60)
    assert result.returncode == EXIT_FAILED
    assert not events(run)


def test_a_rank_of_an_older_generation_does_not_record_its_end(make_run: MakeRun) -> None:
    run = make_run()
    run.generation -= 1
    outcome = start(run, nproc=1)
    assert outcome.exit_code == EXIT_FAILED
    assert "taken over" in outcome.failure.message
    assert "state" not in run.status()


def test_more_ranks_than_gpus_is_refused_and_a_cpu_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["H200", "H200"])
    local.check_devices(2)
    with pytest.raises(LaunchError) as refused:
        local.check_devices(3)
    assert "runner=check" in refused.value.hint and "slurm" not in refused.value.hint
    assert refused.value.exit_code == EXIT_CONFIG
    monkeypatch.setattr(machine, "gpus", list)
    local.check_devices(64)


def test_the_port_is_free_for_listening_and_for_nobody_else() -> None:
    import socket

    with local.free_port() as port, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("127.0.0.1", port))


def test_the_users_thread_count_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = local.rank_environment(1, nproc=2, port=4242)
    assert (env["OMP_NUM_THREADS"], env["RANK"], env["WORLD_SIZE"], env["MASTER_PORT"]) == ("7", "1", "2", "4242")


def test_a_silent_rank_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert "line 99" in local._tail(log) and "line 79" not in local._tail(log)
    assert local._tail(tmp_path / "none.log") == ""
