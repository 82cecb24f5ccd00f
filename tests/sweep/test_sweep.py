"""Sweeps with real processes: states at once, repeats that run only what is missing, failures alone, kills."""

from __future__ import annotations

import csv
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.helpers import starts, status, wait_for
from titanyaml.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_PREEMPTED

Start = Callable[..., subprocess.Popen]


def jobs(sweep: Path) -> dict[str, Path]:
    """What the job was about (its last override) to its folder."""
    folders = {}
    for path in sweep.glob("*/overrides.yaml"):
        typed = [line[2:] for line in path.read_text().splitlines() if line.startswith("- ")]
        folders[next(override for override in typed if override.startswith(("optim.lr", "+user.")))] = path.parent
    return folders


def states(sweep: Path) -> dict[str, str]:
    return {name: status(folder)["state"] for name, folder in jobs(sweep).items()}


def test_a_repeated_sweep_runs_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    sweep = tmp_path / "sw"
    first = cli("-m", "optim.lr=1e-3,fast,2e-3", "train.steps=2", "hydra.sweep.dir=sw", stand_in=True)
    assert first.returncode == EXIT_CONFIG, first.stderr
    assert states(sweep) == {"optim.lr=0.001": "done", "optim.lr=fast": "failed", "optim.lr=0.002": "done"}
    bad = status(jobs(sweep)["optim.lr=fast"])
    assert bad["exit_code"] == EXIT_CONFIG and "optim.lr: is 'fast'" in bad["reason"]
    assert "is 'fast'" in first.stderr
    ids = {status(folder)["run_id"] for name, folder in jobs(sweep).items() if name != "optim.lr=fast"}
    assert len(ids) == 2

    repeated = cli("optim.lr=2e-3,3e-3,1e-3", "-m", "train.steps=2", "hydra.sweep.dir=sw", stand_in=True)
    assert repeated.returncode == 0, repeated.stderr  # of this command's jobs none failed
    assert {name: starts(folder) for name, folder in jobs(sweep).items()} == {
        "optim.lr=0.001": 1,
        "optim.lr=fast": 0,
        "optim.lr=0.002": 1,
        "optim.lr=0.003": 1,
    }
    assert repeated.stderr.count("is finished") == 2
    rows = list(csv.DictReader((sweep / "sweep.csv").open()))
    assert [row["state"] for row in rows] == ["done", "failed", "done", "done"]
    assert [row["metric"] for row in rows] == ["0.001", "", "0.002", "0.003"]
    assert {row["folder"] for row in rows} == {folder.name for folder in jobs(sweep).values()}
    assert "optim.lr=0.003" in repeated.stdout and "train.steps=2 " not in repeated.stdout.split("sweep.csv")[1]


def test_a_failed_job_does_not_stop_the_others_and_runs_again(cli: Cli, tmp_path: Path) -> None:
    sweep = tmp_path / "sw"
    arguments = ("-m", "+user.fail=non_finite,no", "train.steps=1", "hydra.sweep.dir=sw")
    result = cli(*arguments, stand_in=True)
    assert result.returncode == 4, result.stderr
    assert states(sweep) == {"+user.fail=non_finite": "failed", "+user.fail=no": "done"}
    # the job's folder does not depend on how it is started
    stopped = cli(*arguments, "sweep.on_failure=stop", stand_in=True)
    assert stopped.returncode == 4
    assert {name: starts(folder) for name, folder in jobs(sweep).items()} == {
        "+user.fail=non_finite": 2,
        "+user.fail=no": 1,
    }
    assert "is finished" not in stopped.stderr  # it stopped before the second job


def test_stop_ends_the_sweep_at_the_first_failure(cli: Cli, tmp_path: Path) -> None:
    result = cli("-m", "+user.fail=error,no", "hydra.sweep.dir=sw", "sweep.on_failure=stop", stand_in=True)
    assert result.returncode == EXIT_FAILED
    assert states(tmp_path / "sw") == {"+user.fail=error": "failed"}
    assert "failed" in result.stdout


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_an_interrupted_sweep_goes_on_where_it_was(cli: Cli, start: Start, tmp_path: Path, how: str) -> None:
    sweep = tmp_path / "sw"
    arguments = ("-m", "+user.step_s=0.0,0.05,0.01", "train.steps=40", "hydra.sweep.dir=sw")
    process = start(*arguments)
    slow = "+user.step_s=0.05"
    wait_for(lambda: slow in jobs(sweep) and starts(jobs(sweep)[slow]) == 1)
    if how == "kill":
        process.kill()
        process.wait()
        assert states(sweep) == {"+user.step_s=0.0": "done", slow: "running"}
    else:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == EXIT_PREEMPTED
        assert states(sweep) == {"+user.step_s=0.0": "done", slow: "preempted"}
        assert "preempted" in (tmp_path / "output.txt").read_text().split("sweep.csv")[1]
    repeated = cli(*arguments, stand_in=True)
    assert repeated.returncode == 0, repeated.stderr
    assert {name: starts(folder) for name, folder in jobs(sweep).items()} == {
        "+user.step_s=0.0": 1,
        slow: 2,
        "+user.step_s=0.01": 1,
    }
    assert set(states(sweep).values()) == {"done"}


def test_two_commands_on_one_sweep_run_each_job_once(start: Start, tmp_path: Path) -> None:
    sweep = tmp_path / "sw"
    arguments = ("-m", "+user.step_s=0.04,0.05", "train.steps=50", "hydra.sweep.dir=sw")
    both = [start(*arguments), start(*arguments)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert [starts(folder) for folder in jobs(sweep).values()] == [1, 1]
    assert set(states(sweep).values()) == {"done"}
    assert "left to it" in (tmp_path / "output.txt").read_text()


EXPERIMENT = """# @package _global_
hydra:
  mode: MULTIRUN
  sweep: {dir: sw}
  sweeper: {params: {optim.lr: '1e-3,2e-3'}}
train: {steps: 1, seq_len: 16}
"""


def test_an_experiment_file_can_be_a_sweep_and_a_changed_one_is_another(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "experiment" / "rates.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(EXPERIMENT)
    arguments = ("--config-dir", "mine", "experiment=rates")
    result = cli(*arguments, stand_in=True)
    assert result.returncode == 0, result.stderr
    assert set(states(tmp_path / "sw").values()) == {"done"} and len(states(tmp_path / "sw")) == 2
    file.write_text(EXPERIMENT.replace("seq_len: 16", "seq_len: 32"))
    changed = cli(*arguments, stand_in=True)
    assert changed.returncode == EXIT_CONFIG
    assert "train.seq_len: is 32, but" in changed.stderr
    assert set(states(tmp_path / "sw").values()) == {"done"}  # what was done there stays
