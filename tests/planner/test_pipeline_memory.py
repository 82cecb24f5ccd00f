"""How many forwards a pipeline rank holds: the planner's count against the orders that torch runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from titanyaml.pipeline import plan as plans
from titanyaml.pipeline_schedule.actions import Action
from titanyaml.pipeline_schedule.kinds import KINDS, owners
from titanyaml.planner import memory
from titanyaml.planner.inputs import Mesh


def most_held(order: Sequence[Action]) -> int:
    """Forwards of stages without their whole backward at one time."""
    held = most = 0
    for action in order:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_forwards_held_are_those_of_the_schedule(job, name: str, ranks: int) -> None:
    kind = KINDS[name]
    for per_rank in {kind.fewest, kind.most or 3}:
        placed = owners(kind.placement, ranks=ranks, stages=per_rank * ranks)
        for microbatches in (kind.smallest(ranks), 4 * ranks):
            made = job(mesh=Mesh(pp=ranks), schedule=name, stages_per_rank=per_rank, local_batch=microbatches,
                       microbatches=microbatches)
            orders = plans.named_orders(name, owners=placed, microbatches=microbatches)
            assert [memory.forwards_held(made, rank) for rank in range(ranks)] == [most_held(one) for one in orders]
