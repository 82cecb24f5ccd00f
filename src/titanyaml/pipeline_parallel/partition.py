"""Which rank runs which blocks in which order: decided before anything is split, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanyaml.distributed import compat
from titanyaml.models.protocol import ModelFacts
from titanyaml.pipeline_schedule import actions, stages
from titanyaml.pipeline_schedule.actions import Action
from titanyaml.pipeline_schedule.kinds import KINDS, owners
from titanyaml.pipeline_schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class PipelinePartition:
    """A pipeline.

    Args:
        schedule: name of a schedule, or the file of one. from_file: which of the two.
        owners: the pipeline rank of each stage. blocks: the names of its blocks.
        microbatches: forwards of a step.
    """

    schedule: str
    from_file: bool
    owners: tuple[int, ...]
    blocks: tuple[tuple[str, ...], ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.owners) + 1

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in their order."""
        return [stage for stage, owner in enumerate(self.owners) if owner == rank]

    def orders(self) -> list[list[Action]]:
        """What each rank runs in which order."""
        if self.from_file:
            return actions.orders(actions.read(self.schedule))
        return named_orders(self.schedule, owners=self.owners, microbatches=self.microbatches)

    def timeline(self) -> Timeline:
        """When each action runs at unit costs (F = 1, B = 2, I = W = 1, every stage alike)."""
        return simulate(self.orders(), stages=len(self.owners))


def named_orders(schedule: str, *, owners: Sequence[int], microbatches: int) -> list[list[Action]]:
    """The orders of torch's schedule of this name."""
    if schedule == "1F1B":
        return _one_forward_one_backward(len(owners), microbatches)
    rows = compat.schedule_rows(schedule, owners=owners, microbatches=microbatches)
    return actions.orders(actions.parse(rows))


def _one_forward_one_backward(ranks: int, microbatches: int) -> list[list[Action]]:
    """What torch's loop does: a rank runs as many forwards ahead as stages are left, itself included.

    The order that torch 2.13 tells of this schedule is another one: that of the last rank starts at
    microbatch 1 and ends one too late.
    """
    orders = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        order = [Action(rank, "F", microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            order.append(Action(rank, "B", microbatch))
            if ahead + microbatch < microbatches:
                order.append(Action(rank, "F", ahead + microbatch))
        orders.append(order)
    return orders


def make(
    facts: ModelFacts,
    *,
    seq_len: int,
    ranks: int,
    microbatches: int,
    schedule: str,
    csv: str | None,
    per_rank: int | None,
    names: Sequence[str],
    first_less: int | None,
    last_less: int | None,
) -> PipelinePartition:
    """The pipeline that the configuration asks for.

    Raises:
        ValueError: the layers cannot be cut as told, or the file cannot be read.
    """
    if csv is not None:
        csv = str(Path(csv).expanduser())
        placed = actions.placement(actions.read(csv))
    else:
        kind = KINDS[schedule]
        placed = owners(kind.placement, ranks=ranks, stages=kind.per_rank(per_rank) * ranks)
    if len(facts.blocks) < len(placed):
        raise ValueError(f"{len(facts.blocks)} layers are fewer than {len(placed)} stages")
    if names or first_less is not None or last_less is not None:
        counts = stages.given(len(facts.blocks), len(placed), names=names, first_less=first_less, last_less=last_less)
    else:
        counts = balanced_layers(facts, seq_len=seq_len, count=len(placed))
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    blocks = tuple(facts.blocks[end - count : end] for end, count in zip(ends, counts, strict=True))
    return PipelinePartition(csv or schedule, csv is not None, placed, blocks, microbatches)


def balanced_layers(facts: ModelFacts, *, seq_len: int, count: int) -> list[int]:
    """Layers of each of ``count`` stages by cost: FLOPs of a token first, then parameters.

    The head has FLOPs and parameters, the embedding parameters only; tied, both have those of the one weight.
    """
    table = facts.num_embedding_params
    block_params = (facts.num_params - (1 if facts.tied else 2) * table) / facts.num_layers
    attention = 12 * facts.num_heads * facts.head_dim * seq_len
    flops = [6 * block_params + attention] * facts.num_layers
    sizes = [block_params] * facts.num_layers
    flops[-1] += 6 * table
    sizes[0] += table
    sizes[-1] += table
    return stages.balanced(flops, sizes, count)
