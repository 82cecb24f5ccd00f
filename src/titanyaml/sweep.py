"""The table of what a sweep directory holds.

There is no record of a sweep but its jobs' folders. Each job's folder is named by its overrides and says in status.json
how it went. So the same command with the same ``hydra.sweep.dir`` runs what is missing, and the table can be made by
anybody at any time.
"""

import csv
import io
import statistics
from pathlib import Path
from typing import Any

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from titanyaml.rundir import RunDir, atomic_write

#: Column of the printed table to its heading. sweep.csv has all fields of a row.
HEADINGS = {
    "overrides": "overrides",
    "state": "state",
    "loss": "loss",
    "validation_loss": "validation loss",
    "tps": "tokens/s per device",
    "folder": "folder",
}
_NUMBER_FORMATS = {"loss": ".4f", "validation_loss": ".4f", "tps": ",.0f"}

_directory: Path | None = None


class SweepCallback(Callback):
    """Tells this module where the sweep writes (conf/titan_hydra.yaml names it as a callback of Hydra's)."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember the sweep directory: after the jobs Hydra hands nothing back that names it."""
        global _directory
        _directory = Path(config.hydra.sweep.dir).absolute()


def directory() -> Path | None:
    """Where the sweep of this command writes; None before one has begun."""
    return _directory


def rows(sweep_dir: Path) -> list[dict[str, Any]]:
    """One row per job folder, in the order in which the jobs were first started."""
    jobs = [_row(path.parent) for path in sweep_dir.glob("*/status.json")]
    return sorted(jobs, key=lambda row: (row["started"], row["folder"]))


def _row(folder: Path) -> dict[str, Any]:
    run = RunDir(folder)
    status, records = run.status(), run.metrics()
    path = folder / "overrides.yaml"
    overrides = yaml.safe_load(path.read_text())["overrides"] if path.exists() else []
    speeds = [record["tps"] for record in records if "tps" in record]
    state = status.get("state", "unknown")
    if state == "running" and run.owner() is None:  # killed: nobody was left to write the end
        state = "interrupted"
    return {
        "overrides": overrides,
        "state": state,
        "exit_code": status.get("exit_code"),
        "step": status.get("step"),
        "loss": _last(records, "loss"),
        "validation_loss": _last(records, "validation_loss"),
        # the median leaves out the first steps, which compile; a plan has no steps and a tps in its status
        "tps": statistics.median(speeds) if speeds else status.get("tps"),
        "metric": status.get("metric"),
        "reason": status.get("reason"),
        "config_hash": status.get("config_hash"),
        "started": status.get("started", ""),
        "folder": folder.name,
    }


def _last(records: list[dict[str, Any]], name: str) -> float | None:
    return next((record[name] for record in reversed(records) if record.get(name) is not None), None)


def report(sweep_dir: Path, console: Console) -> None:
    """Print the table of ``sweep_dir`` and write it to sweep.csv there."""
    if jobs := rows(sweep_dir):
        atomic_write(sweep_dir / "sweep.csv", _csv(jobs))
        console.print(table(jobs, title=f"{sweep_dir} (sweep.csv)"))


def _csv(jobs: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(jobs[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"overrides": " ".join(row["overrides"])} for row in jobs)
    return text.getvalue()


def table(jobs: list[dict[str, Any]], *, title: str) -> Table:
    """``rows`` for a person: of the overrides only those in which the jobs differ."""
    result = Table(title=title, title_justify="left")
    for name, heading in HEADINGS.items():
        result.add_column(heading, justify="right" if name in _NUMBER_FORMATS else "left", overflow="fold")
    # a single job shares nothing with others: its overrides are all shown
    common = set.intersection(*(set(row["overrides"]) for row in jobs)) if len(jobs) > 1 else set()
    for row in jobs:
        differing = " ".join(override for override in row["overrides"] if override not in common) or "-"
        cells = row | {"overrides": differing}
        result.add_row(*(_cell(name, cells[name]) for name in HEADINGS))
    return result


def _cell(name: str, value: Any) -> str:
    return "-" if value is None else format(value, _NUMBER_FORMATS.get(name, ""))
