"""The schedules that have a name: where their stages lie, and how many microbatches fill the pipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One schedule of torch.distributed.pipelining.

    Args:
        name: as torch and ``parallel.pp_schedule`` spell it.
        placement: ``loop``: stage s is on rank s mod ranks; ``v``: down the ranks and back up.
        fewest, most: stages on a rank; most None: any number.
        splits: whether a backward is done in two parts, by input first and by weight later.
        rounds: whether the microbatches go through in rounds of equal size.
    """

    name: str
    placement: str
    fewest: int
    most: int | None
    splits: bool = False
    rounds: bool = False

    def allows(self, per_rank: int) -> bool:
        """Whether a rank may hold so many stages."""
        return per_rank >= self.fewest and (self.most is None or per_rank <= self.most)

    def per_rank(self, asked: int | None) -> int:
        """Stages on a rank: as asked, else the fewest."""
        return self.fewest if asked is None else asked

    def fills(self, microbatches: int, *, ranks: int) -> bool:
        """Whether so many microbatches keep every rank busy once, in whole rounds."""
        return microbatches >= self.smallest(ranks) and not (self.rounds and microbatches % (microbatches // ranks))

    def smallest(self, ranks: int) -> int:
        """Fewest microbatches with which every rank is busy once."""
        return {"ZBVZeroBubble": 2 * ranks - 1, "DualPipeV": 2 * ranks}.get(self.name, ranks)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("GPipe", "loop", 1, 1),
        Kind("1F1B", "loop", 1, 1),
        Kind("Interleaved1F1B", "loop", 2, None, rounds=True),
        Kind("LoopedBFS", "loop", 2, None),
        Kind("InterleavedZeroBubble", "loop", 2, None, splits=True, rounds=True),
        Kind("ZBVZeroBubble", "v", 2, 2, splits=True),
        Kind("DualPipeV", "v", 2, 2, splits=True),
    )
}


def owners(placement: str, *, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of each stage."""
    if placement == "v":
        assert stages == 2 * ranks, "a V goes down the ranks and back once"
        return tuple(range(ranks)) + tuple(reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(stages))
