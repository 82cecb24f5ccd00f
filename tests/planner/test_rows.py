"""The planner against what was published and measured: docs/planner.md states the same figures row by row."""

from __future__ import annotations

import random
import statistics
from types import ModuleType

import pytest

from titanyaml.planner import constants


@pytest.fixture(scope="module")
def rows(published: ModuleType) -> list:
    return published.rows()


def of(rows: list, *groups: str) -> list:
    return [row for row in rows if row.group in groups and not row.reason]


def test_torchtitan_rows(rows: list, published: ModuleType) -> None:
    mine = of(rows, "torchtitan")
    assert len(mine) == 25
    median, p90, worst = published.statistics_of([row.error for row in mine])
    assert median <= 0.04
    assert p90 <= 0.10
    assert worst <= 0.12


def test_no_half_is_luck(rows: list) -> None:
    errors = [abs(row.error) for row in of(rows, "torchtitan")]
    medians = [statistics.median(random.Random(seed).sample(errors, len(errors) // 2)) for seed in range(20)]
    assert max(medians) < 0.07


def test_memory_without_pipeline(rows: list, published: ModuleType) -> None:
    mine = [row for row in of(rows, "torchtitan") if row.memory is not None]
    median, _, worst = published.statistics_of([row.memory_error for row in mine if row.job.mesh.pp == 1])
    assert median <= 0.04
    assert worst <= 0.12
    pipes = [row.memory_error for row in mine if row.job.mesh.pp > 1]
    assert len(pipes) == 6
    assert max(pipes) <= 0.02, "a lower bound"
    assert min(pipes) >= -0.30


def test_other_rows(rows: list, published: ModuleType) -> None:
    mine = of(rows, "torchao", "llm-foundry")
    assert len(mine) == 44
    median, p90, _ = published.statistics_of([row.error for row in mine])
    assert median <= 0.05
    assert p90 <= 0.18


def test_h200_rows(rows: list, published: ModuleType) -> None:
    mine = of(rows, "measured")
    median, _, worst = published.statistics_of([row.error for row in mine])
    assert median <= 0.03
    assert worst <= 0.10
    median, _, worst = published.statistics_of([row.memory_error for row in mine])
    assert median <= 0.02
    assert worst <= 0.05


def test_own_rows(rows: list, published: ModuleType) -> None:
    mine = of(rows, "titanyaml")
    assert len(mine) == 9
    assert published.statistics_of([row.error for row in mine])[2] <= 0.05
    assert published.statistics_of([row.memory_error for row in mine])[2] <= 0.04


def test_pairs_are_ordered_right(rows: list, published: ModuleType) -> None:
    found = published.pairs(rows)
    assert len(found) >= 40
    wrong = [(slow.label, fast.label) for slow, fast in found if slow.tps >= fast.tps]
    assert wrong == []
    assert statistics.median(abs(fast.tps / slow.tps / (fast.published / slow.published) - 1)
                             for slow, fast in found) <= 0.05


def test_every_row_that_is_left_out_says_why(rows: list) -> None:
    left = [row for row in rows if row.reason]
    assert len(left) + len(of(rows, "torchtitan", "torchao", "llm-foundry", "measured", "titanyaml")) == len(rows)
    assert {row.source.split(" ")[0] for row in left} == {"torchao", "NVIDIA", "Megatron-Bridge"}


def test_fitted_numbers_are_plausible() -> None:
    assert len(constants.ALL) <= 14
    for name, one in constants.ALL.items():
        assert one.low <= one.value <= one.high, name


def test_the_page_and_the_plot_are_fresh(rows: list, published: ModuleType) -> None:
    text = (published.DOCS / "planner.md").read_text(encoding="utf-8")
    assert text == published.page(text, rows), "stale: run python benchmarks/planner_rows.py --write"
    assert (published.DOCS / "planner.svg").read_text(encoding="utf-8") == published.plot(rows)
