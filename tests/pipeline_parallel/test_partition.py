"""The schedules that torch runs, as data: valid, and with the bubbles that the literature gives."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.plugins.small import spec
from titanyaml.models import decoder
from titanyaml.pipeline_parallel import partition
from titanyaml.pipeline_schedule.actions import Action
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS, stage_owners
from titanyaml.pipeline_schedule.simulate import ScheduleDeadlock, simulate
from titanyaml.pipeline_schedule.validate import first_violation

#: Idle time of a rank in units of F, divided by ranks - 1: F + B; with backwards in two parts F + I - W.
IDLE = {
    "GPipe": 3,
    "1F1B": 3,
    "Interleaved1F1B": 3,
    "LoopedBFS": 3,
    "InterleavedZeroBubble": 1,
    "ZBVZeroBubble": 1,
    "DualPipeV": 1,
}


@pytest.mark.parametrize("name", SCHEDULE_KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_named_schedules_come_to_their_end(name: str, ranks: int) -> None:
    kind = SCHEDULE_KINDS[name]
    for per_rank in {kind.min_stages, kind.max_stages or 3}:
        placed = stage_owners(kind.placement, ranks=ranks, stages=per_rank * ranks)
        for microbatches in (kind.min_microbatches(ranks), 4 * ranks):
            orders = partition.schedule_orders(name, owners=placed, microbatches=microbatches)
            assert first_violation([[(action,) for action in order] for order in orders], ranks=ranks) == ""
            timeline = simulate(orders, stages=len(placed))
            work = 3 * per_rank * microbatches
            assert timeline.length == work + IDLE[name] * (ranks - 1), (per_rank, microbatches)
            assert timeline.bubble == pytest.approx(1 - work / timeline.length)


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULE_KINDS.items() if kind.needs_whole_rounds])
def test_only_whole_rounds_are_legal(name: str) -> None:
    for microbatches in range(1, 20):
        try:
            partition.schedule_orders(name, owners=(0, 1, 2, 0, 1, 2), microbatches=microbatches)
            torch_takes_it = True
        except ValueError:
            torch_takes_it = False
        assert SCHEDULE_KINDS[name].is_filled_by(microbatches, ranks=3) == (torch_takes_it and microbatches >= 3), (
            microbatches
        )


def test_costs_of_stages_are_the_callers() -> None:
    orders = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    timeline = simulate(orders, stages=2, cost=lambda action: 10.0 if action.stage else 1.0)
    assert [(span.start, span.end) for span in timeline.ranks[0]] == [(0, 1), (21, 22)]
    with pytest.raises(ScheduleDeadlock):
        simulate([orders[0], orders[1][1:]], stages=2)


def test_balanced_by_flops_then_by_parameters() -> None:
    facts = decoder.build(spec(num_layers=16)).facts
    heavy = replace(facts, num_embedding_params=10**6, num_params=facts.num_params + 2 * 10**6)
    assert partition.balanced_layers(facts, seq_len=16, count=4) == [4, 4, 4, 4]
    # the head alone costs more than all layers: it gets one, and the embedding, which has parameters only, too
    assert partition.balanced_layers(heavy, seq_len=16, count=4) == [1, 7, 7, 1]


def test_pictures_and_table_are_fresh() -> None:
    docs = Path(__file__).parents[2] / "docs"
    module_spec = importlib.util.spec_from_file_location("make_pipeline", docs / "make_pipeline.py")
    maker = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(maker)
    text = maker.PAGE.read_text(encoding="utf-8")
    assert text == maker.page(text), "stale: run python docs/make_pipeline.py"
    for name, content in maker.images().items():
        assert (docs / "img" / name).read_text(encoding="utf-8") == content, "stale: run python docs/make_pipeline.py"


def test_the_check_shows_stages_and_what_other_schedules_would_cost() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    two_stages = partition.PipelinePartition("1F1B", False, (0, 1), (("layers.0",), ("layers.1", "layers.2")), 2)
    console.print(partition.stages_table(two_stages), partition.schedules_table(two_stages))
    lines = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert rows == [
        ["0", "0", "1", "embedding, layers.0"],
        ["1", "1", "2", "layers.1 .. layers.2, final norm, head"],
        ["this run: 1F1B", "2", "2", "33.3%"],
        ["GPipe", "2", "2", "33.3%"],  # four stages have no three layers
    ]
