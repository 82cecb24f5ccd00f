"""Microbatches in flight on a pipeline rank, by the orders of torch's schedules.

A rank runs warm-up forwards, then backwards and forwards in turn, then the remaining backwards. Its stages take turns
in rounds: all microbatches of a round have their backward in the last stage before any has it in the stage before.
So not everything peaks at once: while most forwards are in flight, the first stages have no gradients yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS
from titanyaml.planner.model.inputs import Job

#: Stages whose weights torch's schedules with several stages per rank keep gathered at most.
MAX_GATHERED_STAGES = 3


@dataclass(frozen=True)
class PipelineInstant:
    """What a rank holds while a backward runs. Stages are numbered among the rank's own, from 0."""

    in_flight: int  # forwards of stages whose activations are held, this backward's among them
    stage: int  # whose backward runs
    outputs: int  # outputs of the model's last stage that were returned to the caller before
    unreduced: tuple[int, ...]  # stages between their first backward and the reduction after their last one
    reduced: tuple[int, ...]  # stages whose gradients are reduced
    unfreed: tuple[int, ...]  # stages of ``unreduced`` without a forward since, which would have freed their weights
    at_first_block: bool = False  # the backward ends: its activations are gone, its gradients and weights are there
    first_backward: bool = False  # ... and is the stage's first: that block's gradients and the embedding's are to come


def forwards_held(job: Job, rank: int) -> int:
    """The most forwards of stages whose activations a pipeline rank holds at once."""
    if job.max_in_flight:
        return job.max_in_flight[rank]
    p, v, m = job.mesh.pp, job.stages_per_rank, job.microbatches
    ranks_after = p - 1 - rank
    # warm-up forwards and the one of the first backward; tests compare with the orders that torch runs
    limits = {
        "1F1B": ranks_after + 1,
        "Interleaved1F1B": (v - 1) * p + 2 * ranks_after + 1,
        "InterleavedZeroBubble": v * p,
        "ZBVZeroBubble": 2 * p,
        "DualPipeV": 2 * p + 1,
    }
    return min(m * v, limits.get(job.schedule, m * v))


def instants(job: Job, rank: int) -> Iterator[PipelineInstant]:
    """The instants that may need the most memory: start and end of each stage's first, second and last backward.

    In a V schedule, or one from a file, half of a stage's backwards are taken to come before the next stage's first.
    """
    v, limit = job.stages_per_rank, forwards_held(job, rank)
    total = job.microbatches * v
    turn = _microbatches_per_turn(job)
    # backwards on this rank before each stage's first and last
    first = [(v - 1 - stage) * turn for stage in range(v)]
    last = [total - 1 - stage * turn for stage in range(v)]
    for stage in range(v):
        for backwards in sorted({first[stage], min(first[stage] + 1, last[stage]), last[stage]}):
            in_flight = min(limit, total - backwards)
            unreduced = tuple(i for i in range(v) if first[i] < backwards <= last[i])
            rounds, forwards_in_round = divmod(backwards + in_flight, v * turn)
            # the last stage's forwards are the last turn of each round
            outputs = rounds * turn + max(0, forwards_in_round - (v - 1) * turn) - (stage == v - 1)
            reduced = tuple(i for i in range(v) if last[i] < backwards)
            # once fewer forwards are in flight than possible, no forward will come
            unfreed = unreduced if in_flight < limit else ()
            start = PipelineInstant(in_flight, stage, outputs, unreduced, reduced, unfreed)
            yield start
            yield replace(
                start,
                in_flight=in_flight - 1,
                unreduced=_including(unreduced, stage),
                unfreed=_including(unfreed, stage),
                at_first_block=True,
                first_backward=stage not in unreduced,
            )


def _including(stages: tuple[int, ...], stage: int) -> tuple[int, ...]:
    return stages if stage in stages else (*stages, stage)


def _microbatches_per_turn(job: Job) -> int:
    """Microbatches that one stage takes before the next stage of its rank has its turn."""
    ranks, count = job.mesh.pp, job.microbatches
    if job.max_in_flight or SCHEDULE_KINDS[job.schedule].placement == "v":
        return max(1, count // 2)
    return count // max(1, count // ranks) if SCHEDULE_KINDS[job.schedule].needs_whole_rounds else count
