"""The planner against published and measured runs: docs/planner.md states the same figures row by row.

The bounds are targets, and the rows do not move: an error that grows is a change of the planner.
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
from types import ModuleType

import pytest

from titanyaml.planner.model import constants


@pytest.fixture(scope="module")
def rows(published: ModuleType) -> list:
    return published.rows()


def planned_of(rows: list, *groups: str) -> list:
    return [row for row in rows if row.group in groups and not row.reason]


def test_torchtitan_rows(rows: list, published: ModuleType) -> None:
    titan = planned_of(rows, "torchtitan")
    assert len(titan) == 25
    median, p90, worst = published.statistics_of([row.error for row in titan])
    assert median <= 0.04
    assert p90 <= 0.10
    assert worst <= 0.12


def test_random_halves_agree(rows: list) -> None:
    errors = [abs(row.error) for row in planned_of(rows, "torchtitan")]
    medians = [statistics.median(random.Random(seed).sample(errors, len(errors) // 2)) for seed in range(20)]
    assert max(medians) < 0.07


def test_memory_without_pipeline(rows: list, published: ModuleType) -> None:
    stated = [row for row in planned_of(rows, "torchtitan") if row.memory is not None]
    median, _, worst = published.statistics_of([row.memory_error for row in stated if row.job.mesh.pp == 1])
    assert median <= 0.04
    assert worst <= 0.12
    pipelines = [row.memory_error for row in stated if row.job.mesh.pp > 1]
    assert len(pipelines) == 6
    assert max(pipelines) <= 0.0, "a lower bound"
    assert min(pipelines) >= -0.30


def test_other_published_rows(rows: list, published: ModuleType) -> None:
    others = planned_of(rows, "torchao", "llm-foundry")
    assert len(others) == 44
    median, p90, _ = published.statistics_of([row.error for row in others])
    assert median <= 0.05
    assert p90 <= 0.18


def test_h200_rows_of_torchtitan(rows: list, published: ModuleType) -> None:
    measured = planned_of(rows, "measured")
    median, _, worst = published.statistics_of([row.error for row in measured])
    assert median <= 0.03
    assert worst <= 0.10
    median, _, worst = published.statistics_of([row.memory_error for row in measured])
    assert median <= 0.02
    assert worst <= 0.05


def test_every_own_row(rows: list) -> None:
    """A new line of benchmarks/measured_titanyaml_h200.csv is held against its plan like every other."""
    own = planned_of(rows, "titanyaml")
    assert len(own) >= 25
    assert [(row.label, row.error) for row in own if abs(row.error) > 0.05] == []
    assert [(row.label, row.memory_error) for row in own if row.memory and abs(row.memory_error) > 0.03] == []


def test_memory_of_one_rank_of_two(published: ModuleType) -> None:
    """What one rank of two reserved, measured without the other, within 4 %."""
    measured = json.loads((published.HERE / "results" / "h200_one_rank_20261130.json").read_text())["rows"]
    assert len(measured) >= 7
    for name, row in measured.items():
        ours = row["ours"]
        options = " ".join(option for option in ours["command"][2:] if not option.startswith("runner"))
        row = {"options": options, "tokens_per_s_per_gpu": ours["tps"], "peak_mem_gib": ours["mem_reserved_gib"]}
        assert abs(published.own_row(row).memory_error) <= 0.04, name


def test_one_host_cluster_is_fitted_on_its_rows(published: ModuleType, configure, monkeypatch) -> None:
    monkeypatch.syspath_prepend(published.HERE)
    script, page = (importlib.import_module(name) for name in ("hosts_fit", "hosts_page"))
    rows = script.measured(page.files(), ["*"])
    assert len(rows) >= 15 and sum(bool(row.job.async_tp) for row in rows.values()) >= 4
    rate = script.fit(list(rows.values()))
    assert configure("hardware=h200", "cluster=nvlink_host").cluster.nvlink_gb_s == rate
    errors = {name: script.at(row, rate) / row.published - 1 for name, row in rows.items()}
    assert {name: error for name, error in errors.items() if abs(error) > 0.08} == {}
    assert {name: row for name, row in rows.items() if abs(row.memory_error) > 0.04} == {}
    text = (published.DOCS / "performance.md").read_text(encoding="utf-8")
    assert text == page.page(text, rows), "stale: run python benchmarks/hosts_page.py --write"


def test_pairs_are_ordered_as_published(rows: list, published: ModuleType) -> None:
    pairs = published.pairs(rows)
    assert len(pairs) >= 40
    assert [(slow.label, fast.label) for slow, fast in pairs if slow.tps >= fast.tps] == []
    ratio_errors = [fast.tps / slow.tps / (fast.published / slow.published) - 1 for slow, fast in pairs]
    assert statistics.median(map(abs, ratio_errors)) <= 0.05


def test_calibrated_rates_without_any_fit(rows: list, published: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fitted: the H200's own rates, and counts in place of the fitted constants."""
    monkeypatch.syspath_prepend(published.HERE)
    calibrated = importlib.import_module("planner_calibrated")
    planned = [row for row in rows if not row.reason]
    before = {name: fitted.value for name, fitted in constants.ALL.items()}
    errors = calibrated.errors(planned, calibrated.read())
    assert {name: fitted.value for name, fitted in constants.ALL.items()} == before
    assert set(calibrated.NEUTRAL) | {"CAST_TENSORWISE", "CAST_ROWWISE", "TP_LEFTOVER", "ALLOCATOR_GIB"} == set(before)
    h200 = [error for row, error in zip(planned, errors, strict=True) if row.job.device.name == "h200"]
    assert len(h200) >= 40
    assert published.statistics_of(h200)[0] <= 0.07
    assert published.statistics_of(errors)[0] <= 0.08
    assert sum(abs(error) <= 0.25 for error in errors) >= 103, "what the range of a calibrated plan says"


def test_rows_left_out_have_a_reason(rows: list) -> None:
    omitted = [row for row in rows if row.reason]
    planned = planned_of(rows, "torchtitan", "torchao", "llm-foundry", "measured", "titanyaml")
    assert len(omitted) + len(planned) == len(rows)
    assert {row.source.split(" ")[0] for row in omitted} == {"torchao", "NVIDIA", "Megatron-Bridge"}


def test_fitted_constants_are_plausible() -> None:
    assert len(constants.ALL) <= 12 - 3, "with GEMM rates in bf16 and float8 and NVLink, which belong to a device"
    for name, fitted in constants.ALL.items():
        assert fitted.low <= fitted.value <= fitted.high, name


def test_page_and_plot_are_fresh(rows: list, published: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(published.HERE)
    planner_page = importlib.import_module("planner_page")
    text = (published.DOCS / "planner.md").read_text(encoding="utf-8")
    assert text == planner_page.page(text, rows), "stale: run python benchmarks/planner_page.py --write"
    assert (published.DOCS / "planner.svg").read_text(encoding="utf-8") == planner_page.plot(rows)
