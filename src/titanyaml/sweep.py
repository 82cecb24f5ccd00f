"""The table of what a sweep directory holds.

There is no record of a sweep but its jobs' folders. Each job's folder is named by its overrides and says in status.json
how it went, so that the same command with the same ``hydra.sweep.dir`` runs what is missing, and the table can be made
by anybody at any time.
"""

from __future__ import annotations

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

COLUMNS = ("overrides", "state", "loss", "validation_loss", "tps", "folder")

_directory: Path | None = None


class Sweep(Callback):
    """Tells this module where the sweep writes (conf/titan_hydra.yaml names it as a callback of Hydra's)."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember the sweep directory."""
        global _directory
        _directory = Path(config.hydra.sweep.dir).absolute()


def directory() -> Path | None:
    """Where the sweep of this command writes; None before one has begun."""
    return _directory


def rows(sweep_dir: Path) -> list[dict[str, Any]]:
    """One row per job folder, in the order in which the jobs were first started."""
    found = [_row(path.parent) for path in sweep_dir.glob("*/status.json")]
    return sorted(found, key=lambda row: (row["started"], row["folder"]))


def _row(folder: Path) -> dict[str, Any]:
    run = RunDir(folder)
    status, records = run.status(), run.metrics()
    typed = folder / "overrides.yaml"
    overrides = yaml.safe_load(typed.read_text())["overrides"] if typed.exists() else []
    speeds = [record["tps"] for record in records if "tps" in record]
    state = status.get("state", "unknown")
    if state == "running" and run.owner() is None:
        state = "interrupted"
    return {
        "overrides": overrides,
        "state": state,
        "exit_code": status.get("exit_code"),
        "step": status.get("step"),
        "loss": _last(records, "loss"),
        "validation_loss": _last(records, "validation_loss"),
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
    found = rows(sweep_dir)
    if not found:
        return
    atomic_write(sweep_dir / "sweep.csv", _csv(found))
    console.print(table(found, title=f"{sweep_dir} (sweep.csv)"))


def _csv(found: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"overrides": " ".join(row["overrides"])} for row in found)
    return text.getvalue()


def table(found: list[dict[str, Any]], *, title: str) -> Table:
    """``rows`` for a person: of the overrides only those in which the jobs differ."""
    result = Table(title=title, title_justify="left")
    for name in COLUMNS:
        numeric = name in ("loss", "validation_loss", "tps")
        heading = {"validation_loss": "validation loss", "tps": "tokens/s per device"}.get(name, name)
        result.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    common = set.intersection(*(set(row["overrides"]) for row in found)) if len(found) > 1 else set()
    for row in found:
        overrides = " ".join(override for override in row["overrides"] if override not in common)
        result.add_row(
            overrides or "-",
            row["state"],
            _number(row["loss"], ".4f"),
            _number(row["validation_loss"], ".4f"),
            _number(row["tps"], ",.0f"),
            row["folder"],
        )
    return result


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
