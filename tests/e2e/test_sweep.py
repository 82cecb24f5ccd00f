"""The shipped learning-rate sweep, shortened: killed midway, with a job that fails, then repeated."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.e2e.helpers import Cli, kill_all, records, status, wait_for
from titanyaml.errors import EXIT_NON_FINITE

SWEEP = (
    "-m",
    "experiment=lr_sweep",
    "optim.lr=1e-3,2e-3,1e30",
    "train.steps=6",
    "train.max_norm=null",
    "train.seq_len=32",
    "model.dim=32",
    "model.num_layers=1",
    "model.ffn_dim=64",
    "validation.batches=1",
    "hydra.sweep.dir=sw",
)


def jobs(cli: Cli) -> dict[str, Path]:
    """Learning rate to job folder."""
    folders = {}
    for path in (cli.folder / "sw").glob("*/overrides.yaml"):
        [rate] = [line.partition("optim.lr=")[2] for line in path.read_text().splitlines() if "optim.lr=" in line]
        folders[rate] = path.parent
    return folders


def test_the_repeated_sweep_runs_what_is_missing(cli: Cli) -> None:
    process = cli.start(*SWEEP)
    assert wait_for(lambda: "0.002" in jobs(cli) and bool(records(jobs(cli)["0.002"])), process=process)
    kill_all(process)
    first = jobs(cli)
    assert set(first) == {"0.001", "0.002"}
    assert status(first["0.001"])["state"] == "done" and status(first["0.002"])["state"] == "running"
    modified = (first["0.001"] / "metrics.jsonl").stat().st_mtime_ns

    repeated = cli(*SWEEP)
    assert repeated.returncode == EXIT_NON_FINITE, repeated.stderr
    assert repeated.stderr.count("is finished; nothing to do") == 1
    assert (first["0.001"] / "metrics.jsonl").stat().st_mtime_ns == modified
    assert {rate: status(path)["state"] for rate, path in jobs(cli).items()} == {
        "0.001": "done",
        "0.002": "done",
        "1e+30": "failed",
    }
    assert [record["step"] for record in records(first["0.002"])] == [1, 2, 3, 4, 5, 6]
    rows = list(csv.DictReader((cli.folder / "sw" / "sweep.csv").open()))
    assert [(row["state"], row["exit_code"]) for row in rows] == [
        ("done", "0"),
        ("done", "0"),
        ("failed", str(EXIT_NON_FINITE)),
    ]
    assert float(rows[1]["validation_loss"]) == records(first["0.002"])[-1]["validation_loss"]
    assert all(row["folder"] in repeated.stdout for row in rows) and "optim.lr=0.002" in repeated.stdout
