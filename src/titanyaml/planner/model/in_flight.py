"""What of a pipeline rank's microbatches is there when a backward begins: by the orders of torch's schedules.

A rank runs forwards ahead, then backwards and forwards in turn, then the backwards that are left. Stages of one rank go
through in rounds: every microbatch of a round has its backward in the last of them before any has it in the one before.
So not everything is at its most at one time: when most forwards are held, the first stages have no gradients yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS
from titanyaml.planner.model.inputs import Job

#: Stages whose weights torch's schedules of several stages a rank keep gathered at most.
ACTIVE = 3


@dataclass(frozen=True)
class Moment:
    """A backward begins on a rank.

    Args:
        held: forwards of stages whose activations are kept, that of this backward among them. stage: whose it is, of
            the rank's own, from 0. outputs: results of the model's last stage that were handed out before.
        grown: stages whose gradients are there in full, from their first backward until the reduction after their last.
        reduced: stages whose gradients are reduced.
        idle: stages of ``grown`` that had no forward since, so that weights which a forward frees are still there.
        ends: the same backward at its last block: its activations are gone, its gradients and its weights are there.
        fresh: in the first backward of the stage; that block's gradients and those of the embedding are yet to come.
    """

    held: int
    stage: int
    outputs: int
    grown: tuple[int, ...]
    reduced: tuple[int, ...]
    idle: tuple[int, ...]
    ends: bool = False
    fresh: bool = False


def forwards_held(job: Job, rank: int) -> int:
    """Forwards of stages whose activations a pipeline rank keeps at most, by the orders of torch's schedules or of the
    file."""
    if job.held:
        return job.held[rank]
    p, v, m = job.mesh.pp, job.stages_per_rank, job.microbatches
    after = p - 1 - rank
    most = {
        "1F1B": after + 1,
        "Interleaved1F1B": (v - 1) * p + 2 * after + 1,
        "InterleavedZeroBubble": v * p,
        "ZBVZeroBubble": 2 * p,
        "DualPipeV": 2 * p + 1,
    }
    return min(m * v, most.get(job.schedule, m * v))


def moments(job: Job, rank: int) -> Iterator[Moment]:
    """Those at which most may be there: the first, the second and the last backward of each stage.

    Of a schedule in a V, or from a file, it is taken that half of the backwards of a stage come before the next one's.
    """
    v, total, most = job.stages_per_rank, job.microbatches * job.stages_per_rank, forwards_held(job, rank)
    turn = _turn(job)
    first = [(v - 1 - stage) * turn for stage in range(v)]  # backwards of the rank before each stage's own
    last = [total - 1 - stage * turn for stage in range(v)]
    for stage in range(v):
        for done in sorted({first[stage], min(first[stage] + 1, last[stage]), last[stage]}):
            held = min(most, total - done)
            grown = tuple(one for one in range(v) if first[one] < done <= last[one])
            whole, begun = divmod(done + held, v * turn)
            moment = Moment(
                held,
                stage,
                whole * turn + max(0, begun - (v - 1) * turn) - (stage == v - 1),
                grown,
                tuple(one for one in range(v) if last[one] < done),
                grown if held < most else (),
            )
            yield moment
            yield replace(
                moment,
                held=held - 1,
                grown=_with(grown, stage),
                idle=_with(moment.idle, stage),
                ends=True,
                fresh=stage not in grown,
            )


def _with(stages: tuple[int, ...], stage: int) -> tuple[int, ...]:
    return stages if stage in stages else (*stages, stage)


def _turn(job: Job) -> int:
    """Microbatches that one stage takes before the next one of its rank has its turn."""
    ranks, count = job.mesh.pp, job.microbatches
    if job.held or SCHEDULE_KINDS[job.schedule].placement == "v":
        return max(1, count // 2)
    return count // max(1, count // ranks) if SCHEDULE_KINDS[job.schedule].needs_whole_rounds else count
