"""Compiled graphs from one run to the next."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.helpers import SIZES, Cli


def verified(run: Path) -> str:
    [record] = [entry for entry in json.loads((run / "pipeline.json").read_text()) if entry["node"] == "compile"]
    return record["verified"]["summary"]


def test_graphs_are_kept_for_the_next_run(cli: Cli, tmp_path: Path) -> None:
    """Another process finds what inductor built; the loss alone, whose graph is the smallest."""
    common = (
        *SIZES,
        "data=synthetic",
        "train.steps=1",
        "validation=none",
        "checkpoint=none",
        "compile.loss=true",
        f"compile.cache_dir={tmp_path}/compiled",
    )
    for run_id, state, cached_parts in (("first", "cold", 0), ("second", "warm", 1)):
        process = cli(*common, f"run.id={run_id}")
        assert process.returncode == 0, process.stderr
        assert f"; {state} cache {tmp_path}/compiled" in process.stderr
        assert verified(cli.run(run_id)) == (
            f"1 graph compiled, 0 graph breaks; 1 of them for compile.loss; {cached_parts} of 1 parts out of the cache"
        )
