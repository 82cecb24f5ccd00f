"""A run that was tracked can be found by what it was."""

from __future__ import annotations

import pytest

from tests.e2e.helpers import TRAINING, Cli, events, records


def test_a_tracked_run_is_found_by_a_query(cli: Cli) -> None:
    aim = pytest.importorskip("aim")
    process = cli(*TRAINING, "train.steps=7", "tracker=aim", "optim.lr=2e-3", "run.id=a", "run.name=tracked")
    assert process.returncode == 0, process.stderr
    run = cli.run("a", name="tracked")
    assert not events(run, "tracker_failed") and not events(run, "tracker_incomplete")
    expression = "run.optim.lr == 0.002 and run.model.dim == 32 and run.experiment == 'tracked' and run.state == 'done'"
    points_of_metric = {}
    for collection in aim.Repo(str(cli.folder / "outputs")).query_metrics(expression, report_mode=0).iter_runs():
        for metric in collection:
            points = metric.dataframe()[["step", "value"]].itertuples(index=False)
            points_of_metric[metric.name, metric.context["subset"]] = sorted(
                (int(p.step), float(p.value)) for p in points
            )
    for name in ("loss", "grad_norm", "lr", "tps"):
        assert points_of_metric[name, "train"] == [(record["step"], record[name]) for record in records(run)]
    assert points_of_metric["loss", "validation"] == [(7, records(run)[-1]["validation_loss"])]
