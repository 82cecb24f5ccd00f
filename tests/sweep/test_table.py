"""The table of a sweep directory, from what its jobs left."""

from __future__ import annotations

import csv
from pathlib import Path

import yaml
from rich.console import Console

from titanyaml import sweep
from titanyaml.rundir import RunDir, atomic_write


def job(folder: Path, overrides: list[str], **status: object) -> RunDir:
    run = RunDir(folder)
    atomic_write(folder / "overrides.yaml", yaml.safe_dump({"overrides": overrides, "choices": {}}))
    run.write_status(**status)
    return run


def test_rows_in_the_order_of_their_start(tmp_path: Path) -> None:
    late = job(tmp_path / "a", ["x=1", "y=2"], state="done", started="2", exit_code=0, metric=0.5)
    for step, tps in ((1, 10.0), (2, 300.0), (3, 200.0)):
        late.metric({"step": step, "loss": 4.0 - step, "tps": tps})
    late.metric({"step": 3, "validation_loss": 0.5})
    job(tmp_path / "b", ["x=1", "y=text with blanks"], state="failed", started="1", exit_code=3, reason="no data")
    atomic_write(tmp_path / "multirun.yaml", "")
    first, second = sweep.rows(tmp_path)
    assert (first["folder"], first["state"], first["loss"], first["reason"]) == ("b", "failed", None, "no data")
    assert (second["loss"], second["validation_loss"], second["tps"], second["metric"]) == (1.0, 0.5, 200.0, 0.5)


def test_running_without_an_owner_is_interrupted(tmp_path: Path) -> None:
    run = job(tmp_path / "a", [], state="running", started="1")
    assert sweep.rows(tmp_path)[0]["state"] == "interrupted"
    run.claim()
    assert sweep.rows(tmp_path)[0]["state"] == "running"
    run.release()


def test_the_report_shows_what_differs_and_the_file_holds_all(tmp_path: Path) -> None:
    job(tmp_path / "a", ["same=1", "y=2"], state="done", started="1")
    job(tmp_path / "b", ["same=1", "y=two words"], state="done", started="2")
    console = Console(record=True, width=120)
    sweep.report(tmp_path, console)
    shown = console.export_text()
    assert "y=two words" in shown and "same=1" not in shown
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [row["overrides"] for row in rows] == ["same=1 y=2", "same=1 y=two words"]


def test_a_sweep_without_jobs_leaves_nothing(tmp_path: Path) -> None:
    console = Console(record=True)
    sweep.report(tmp_path, console)
    assert console.export_text() == "" and not list(tmp_path.iterdir())
