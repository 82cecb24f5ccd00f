"""metrics.jsonl, and the sinks that ``build`` chooses."""

from __future__ import annotations

import json
import math

import pytest

from titanyaml import tracker
from titanyaml.errors import ConfigError
from titanyaml.rundir import RunDir
from titanyaml.tracker.aim import AimMirror
from titanyaml.tracker.console import PlainLines


def test_records_keep_every_digit_and_are_written_at_once(config, tmp_path) -> None:
    config.tracker.kind = "none"
    run = RunDir(tmp_path / "run")
    trackers = tracker.build(config, run, console=False)
    records = [{"step": i, "loss": math.pi * 10.0**-i, "lr": 0.1 + 0.2, "grad_norm": 1 / 3} for i in range(1, 5)]
    for count, record in enumerate(records, 1):
        trackers.log(record)
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == records[:count]
    trackers.close("done")


def test_a_resume_overwrites_later_steps(config, tmp_path) -> None:
    config.tracker.kind = "none"
    run = RunDir(tmp_path / "run")
    for steps, loss in (((1, 2, 3), 1.0), ((3, 4), 2.0)):
        run.truncate_metrics(steps[0] - 1)
        trackers = tracker.build(config, run, console=False)
        for step in steps:
            trackers.log({"step": step, "loss": loss})
        trackers.close("done")
    assert [(r["step"], r["loss"]) for r in run.metrics()] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_build_follows_the_configuration(config, tmp_path, capsys, monkeypatch) -> None:
    run = RunDir(tmp_path / "run")
    config.tracker.kind = "none"
    trackers = tracker.build(config, run)
    assert [type(mirror) for mirror in trackers.mirrors] == [PlainLines]
    trackers.log({"step": 1, "loss": 3.0})
    trackers.close("done")
    assert capsys.readouterr().out == "step  1/40  loss 3.0000\n"
    config.tracker.kind = "aim"
    monkeypatch.setattr("titanyaml.tracker.aim.AimMirror._work", lambda self: None)
    assert [type(mirror) for mirror in tracker.build(config, run, console=False).mirrors] == [AimMirror]


def test_aim_that_is_not_installed_is_a_configuration_error(config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(__import__("sys").modules, "aim", raising=False)
    with pytest.raises(ConfigError, match="tracker.kind: Aim is not installed") as error:
        tracker.build(config, RunDir(tmp_path / "run"), console=False)
    assert error.value.exit_code == 2
