"""The named schedules of torch.distributed.pipelining: where their stages lie, and how many microbatches they need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleKind:
    """One named schedule, as torch and ``parallel.pp_schedule`` spell it.

    Args:
        placement: ``loop``: stage s is on rank s mod ranks; ``v``: down the ranks and back up.
        min_stages, max_stages: stages on one rank; max_stages None: any number.
        splits_backward: the gradient of the input is computed first, that of the weights later.
        needs_whole_rounds: the microbatches must divide into rounds of equal size.
    """

    name: str
    placement: str
    min_stages: int
    max_stages: int | None
    splits_backward: bool = False
    needs_whole_rounds: bool = False

    def allows_stages(self, stages_per_rank: int) -> bool:
        return stages_per_rank >= self.min_stages and (self.max_stages is None or stages_per_rank <= self.max_stages)

    def stages_per_rank(self, requested: int | None) -> int:
        """As requested, else the fewest."""
        return self.min_stages if requested is None else requested

    def is_filled_by(self, microbatches: int, *, ranks: int) -> bool:
        """Whether that many microbatches keep every rank busy at once."""
        if microbatches < self.min_microbatches(ranks):
            return False
        # torch makes microbatches // ranks rounds and refuses a remainder
        return not (self.needs_whole_rounds and microbatches % (microbatches // ranks))

    def min_microbatches(self, ranks: int) -> int:
        """Fewest microbatches with which every rank is busy at once."""
        # a V passes each rank twice: torch pads ZBV with microbatches that do not exist below its limit
        return {"ZBVZeroBubble": 2 * ranks - 1, "DualPipeV": 2 * ranks}.get(self.name, ranks)


SCHEDULE_KINDS = {
    kind.name: kind
    for kind in (
        ScheduleKind("GPipe", "loop", 1, 1),  # Huang et al. 2019, arXiv 1811.06965
        ScheduleKind("1F1B", "loop", 1, 1),  # Narayanan et al. 2019, PipeDream; with a flush: arXiv 2006.09503
        ScheduleKind("Interleaved1F1B", "loop", 2, None, needs_whole_rounds=True),  # Megatron-LM, arXiv 2104.04473
        ScheduleKind("LoopedBFS", "loop", 2, None),  # Lamy-Poirier 2022, arXiv 2211.05953
        # Qi et al. 2023, arXiv 2401.10241: ZB1P over several stages on a rank, and ZB-V of its section 6
        ScheduleKind("InterleavedZeroBubble", "loop", 2, None, splits_backward=True, needs_whole_rounds=True),
        ScheduleKind("ZBVZeroBubble", "v", 2, 2, splits_backward=True),
        ScheduleKind("DualPipeV", "v", 2, 2, splits_backward=True),  # after DualPipe of DeepSeek-V3, arXiv 2412.19437
    )
}


def stage_owners(placement: str, *, ranks: int, stages: int) -> tuple[int, ...]:
    if placement == "v":
        assert stages == 2 * ranks, "a V goes down the ranks and back once"
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(stages))
