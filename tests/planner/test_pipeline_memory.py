"""How many forwards a pipeline rank holds: the planner's count against the orders that torch runs."""

from __future__ import annotations

import pytest

from titanyaml.pipeline_parallel import partition
from titanyaml.pipeline_schedule.actions import max_in_flight
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS, stage_owners
from titanyaml.planner.model import from_config, in_flight, memory
from titanyaml.planner.model.inputs import Mesh


@pytest.mark.parametrize("name", SCHEDULE_KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_forwards_held_are_those_of_the_schedule(job, name: str, ranks: int) -> None:
    kind = SCHEDULE_KINDS[name]
    for per_rank in {kind.min_stages, kind.max_stages or 3}:
        placed = stage_owners(kind.placement, ranks=ranks, stages=per_rank * ranks)
        for microbatches in (kind.min_microbatches(ranks), 4 * ranks):
            planned = job(
                mesh=Mesh(pp=ranks),
                schedule=name,
                stages_per_rank=per_rank,
                local_batch=microbatches,
                microbatches=microbatches,
            )
            orders = partition.schedule_orders(name, owners=placed, microbatches=microbatches)
            assert [in_flight.forwards_held(planned, rank) for rank in range(ranks)] == [
                max_in_flight(order) for order in orders
            ]


def test_interleaved_rank_has_gradients_of_one_stage_at_a_time(job) -> None:
    """As many microbatches as ranks: each stage's backwards are over before the one before it has its first."""
    interleaved = job(
        mesh=Mesh(dp_shard=8, pp=4), schedule="Interleaved1F1B", stages_per_rank=2, local_batch=4, microbatches=4
    )
    instants = list(in_flight.instants(interleaved, 0))
    assert {instant.unreduced for instant in instants} == {(), (0,), (1,)}
    assert max(instant.in_flight for instant in instants) == in_flight.forwards_held(interleaved, 0) == 8
    plain = job(mesh=Mesh(dp_shard=8, pp=4), local_batch=4, microbatches=4)
    several, one_stage = (memory.plan_memory(of).parts["unsharded gradients"] for of in (interleaved, plain))
    assert several < 0.7 * one_stage


def test_forwards_held_of_a_schedule_from_a_file(configure, tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n")
    planned = from_config.job(configure("model=llama3_8b", "parallel=pp2", f"parallel.pp_schedule_csv={path}"))
    assert [in_flight.forwards_held(planned, rank) for rank in range(2)] == [2, 1]
