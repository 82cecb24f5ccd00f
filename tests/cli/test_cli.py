"""The command line as users meet it: exit codes, folders, resuming, replaying."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from titanyaml.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_NON_FINITE, EXIT_PREEMPTED
from titanyaml.rundir import RunDir

from .conftest import Cli
from .helpers import starts, status, steps, wait_for


@pytest.mark.parametrize(
    ("arguments", "code", "extra"),
    [
        (["--cfg", "job", "--resolve", "-p", "optim"], 0, {}),
        (["--help"], 0, {}),
        (["--info", "searchpath"], 0, {}),
        (["optim.lr=fast", "trian.steps=3"], EXIT_CONFIG, {}),
        (["-sc", "query=bash"], 0, {"COMP_LINE": "titanyaml parallel=fsdp2_", "COMP_POINT": "26"}),
    ],
    ids=["cfg", "help", "info", "refused", "completion"],
)
def test_looking_and_refusing_import_no_torch_and_write_nothing(
    cli: Cli, tmp_path: Path, arguments: list[str], code: int, extra: dict[str, str]
) -> None:
    result = cli(*arguments, spy=True, **extra)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (code, "torch: False"), result.stderr
    assert not list(tmp_path.iterdir())


def test_a_refused_configuration_is_one_report_without_a_traceback(cli: Cli) -> None:
    result = cli("optim.lr=fast", "trian.steps=3")
    assert result.returncode == EXIT_CONFIG
    assert "2 configuration problems" in result.stderr
    assert "optim.lr" in result.stderr and "train" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("key, more", [("run.dir", []), ("hydra.sweep.dir", ["-m", "train.steps=1,2"])])
def test_a_folder_that_cannot_be_made_is_named(cli: Cli, tmp_path: Path, key: str, more: list[str]) -> None:
    (tmp_path / "file").write_text("")
    result = cli(*more, f"{key}={tmp_path}/file/x")
    assert result.returncode == EXIT_CONFIG
    assert f"{key}: the folder cannot be made" in result.stderr and f"{tmp_path}/file/x" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_works_whatever_is_wrong(cli: Cli) -> None:
    result = cli("--help", "optim.lr=-1")
    assert result.returncode == 0, result.stderr
    assert "parallel:" in result.stdout


def test_a_key_with_dashes_is_explained(cli: Cli) -> None:
    result = cli("--optim.lr=1")
    assert result.returncode == EXIT_CONFIG
    assert "try: keys have no dashes: optim.lr=1" in result.stderr


def test_a_run_is_recorded_repeated_for_nothing_and_extended(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "llama3_debug" / "a"
    first = cli("run.id=a", "train.steps=2", "parallel=fsdp2", stand_in=True)
    assert first.returncode == 0, first.stderr
    assert (status(run)["state"], status(run)["world_size"], status(run)["metric"]) == ("done", 2, 3e-4)
    assert len(status(run)["config_hash"]) == 64
    typed = (run / "overrides.yaml").read_text()
    assert "run.id=a" in typed and "parallel: fsdp2" in typed
    assert "torch" in json.loads((run / "environment.json").read_text())["packages"]
    assert not (run / ".hydra").exists()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["full_error"] for event in events] == [None, None]  # ours does not leak

    repeated = cli("run.id=a", "train.steps=2", "parallel=fsdp2", stand_in=True)
    assert repeated.returncode == 0 and "finished" in repeated.stderr
    assert starts(run) == 2

    more = cli("run.id=a", "train.steps=3", "parallel=ddp2", stand_in=True)  # as many sequences a step
    assert more.returncode == 0, more.stderr
    assert starts(run) == 4 and status(run)["step"] == 3
    assert "train.steps: 2 -> 3" in (run / "events.jsonl").read_text()


def test_an_unfinished_run_goes_on_only_as_it_was_begun(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "llama3_debug" / "a"
    failed = cli("run.id=a", "+user.fail=non_finite", stand_in=True)
    assert failed.returncode == EXIT_NON_FINITE
    assert failed.stderr.count("loss is nan") == 1 and "Traceback" not in failed.stderr
    assert status(run)["error"] == {"rank": 0, "type": "NonFiniteError", "message": "loss is nan"}

    changed = cli("run.id=a", "optim.lr=1", "parallel=fsdp2", "train.steps=1", stand_in=True)
    assert changed.returncode == EXIT_CONFIG
    assert "optim.lr: is 1.0, but" in changed.stderr and "train.global_batch: a step would see" in changed.stderr
    assert "train.steps:" not in changed.stderr
    assert "checkpoint.accept_changes=[" in changed.stderr
    assert starts(run) == 1

    accepted = cli("run.id=a", "optim.lr=1", "train.steps=1", "checkpoint.accept_changes=[optim]", stand_in=True)
    assert accepted.returncode == 0, accepted.stderr
    assert "error" not in status(run) and status(run)["metric"] == 1.0


def test_a_surprise_in_a_rank_is_told_once_with_its_traceback(cli: Cli, tmp_path: Path) -> None:
    failed = cli("run.id=a", "parallel=fsdp2", "+user.fail=error", "+user.rank=1", stand_in=True)
    assert failed.returncode == EXIT_FAILED
    assert failed.stderr.count("RuntimeError: the roof is leaking\nTraceback") == 1
    assert "standins.py" in status(tmp_path / "outputs" / "llama3_debug" / "a")["error"]["traceback"]
    assert "Error executing job" not in failed.stderr


def test_a_run_in_use_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "outputs" / "llama3_debug" / "a")
    run.claim()
    refused = cli("run.id=a", stand_in=True)
    assert refused.returncode == EXIT_FAILED
    assert "in use by process" in refused.stderr
    assert run.status() == {}
    run.release()


def test_sigterm_saves_exits_75_and_says_how_to_go_on(start: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "llama3_debug" / "a"
    process = start("run.id=a", "train.steps=5000", "+user.step_s=0.02")
    wait_for(lambda: (run / "metrics.jsonl").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == EXIT_PREEMPTED
    assert status(run)["state"] == "preempted"
    assert "run.id=a goes on" in (tmp_path / "output.txt").read_text()


def test_a_replay_is_a_new_run_of_the_same_configuration(cli: Cli, tmp_path: Path) -> None:
    first = cli("train.steps=2", "optim.lr=1e-3", "ac=full", stand_in=True)
    assert first.returncode == 0, first.stderr
    (old,) = (tmp_path / "outputs" / "llama3_debug").iterdir()
    before = (old / "config.yaml").read_bytes()
    relative = str(old.relative_to(tmp_path))
    replay = cli("--config-path", relative, "--config-name", "config")
    assert replay.returncode == 0, replay.stderr
    new = next(path for path in old.parent.iterdir() if path != old)
    assert (old / "config.yaml").read_bytes() == (new / "config.yaml").read_bytes() == before
    assert status(old)["config_hash"] == status(new)["config_hash"]
    assert (starts(old), starts(new), steps(new)) == (1, 1, [1, 2])
    # an override of a group's key still reaches the plugin
    shown = cli(
        "--config-path",
        relative,
        "--config-name",
        "config",
        "ac.mode=none",
        "--cfg",
        "job",
        "--resolve",
        "-p",
        "pipeline.plugins.ac",
    )
    assert "mode: none" in shown.stdout, shown.stderr


def test_check_runs_here_and_leaves_no_folder(cli: Cli, tmp_path: Path) -> None:
    result = cli("runner=check", "runner._target_=tests.launch.standins.look", "data=synthetic", spy=True)
    assert result.returncode == 0, result.stderr
    assert "looked at llama3_debug" in result.stdout and "torch: True" in result.stdout
    assert not list(tmp_path.iterdir())
