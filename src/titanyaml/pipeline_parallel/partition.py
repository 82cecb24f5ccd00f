"""How the layers are partitioned into pipeline stages, in which order each rank runs its stages, and tables of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from titanyaml.distributed import compat
from titanyaml.models.protocol import ModelFacts
from titanyaml.pipeline_schedule import actions, stages
from titanyaml.pipeline_schedule.actions import Action
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS, stage_owners
from titanyaml.pipeline_schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class PipelinePartition:
    """The stages of a pipeline and their schedule: its name, or its file where ``from_file`` is true.

    Args:
        owners: the pipeline rank of each stage. blocks: the names of its blocks. microbatches: forwards of a step.
    """

    schedule: str
    from_file: bool
    owners: tuple[int, ...]
    blocks: tuple[tuple[str, ...], ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        return max(self.owners) + 1

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, ascending."""
        return [stage for stage, owner in enumerate(self.owners) if owner == rank]

    def orders(self) -> list[list[Action]]:
        if self.from_file:
            return actions.orders(actions.read(self.schedule))
        return schedule_orders(self.schedule, owners=self.owners, microbatches=self.microbatches)

    def timeline(self) -> Timeline:
        """When each action runs at unit costs (F = 1, B = 2, I = W = 1)."""
        return simulate(self.orders(), stages=len(self.owners))


def schedule_orders(schedule: str, *, owners: Sequence[int], microbatches: int) -> list[list[Action]]:
    """The actions of each rank under torch's schedule of this name."""
    if schedule == "1F1B":
        # torch 2.13 reports another order than it runs: its last rank starts at microbatch 1 and ends one too late
        return _one_forward_one_backward(len(owners), microbatches)
    rows = compat.schedule_rows(schedule, owners=owners, microbatches=microbatches)
    return actions.orders(actions.parse(rows))


def _one_forward_one_backward(ranks: int, microbatches: int) -> list[list[Action]]:
    """As torch's loop runs it: first one forward per stage from this rank to the last, then alternating."""
    orders = []
    for rank in range(ranks):
        warmup = min(microbatches, ranks - rank)
        order = [Action(rank, "F", microbatch) for microbatch in range(warmup)]
        for microbatch in range(microbatches):
            order.append(Action(rank, "B", microbatch))
            if warmup + microbatch < microbatches:
                order.append(Action(rank, "F", warmup + microbatch))
        orders.append(order)
    return orders


def make_partition(
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
    """The partition that the arguments of ``plugins.pp.PipelineParallel`` ask for; ValueError where they do not fit."""
    # a function of facts and configuration: every rank computes the same, and nothing is communicated
    if csv is not None:
        csv = str(Path(csv).expanduser())
        owners = actions.stage_owners(actions.read(csv))
    else:
        kind = SCHEDULE_KINDS[schedule]
        owners = stage_owners(kind.placement, ranks=ranks, stages=kind.stages_per_rank(per_rank) * ranks)
    layers, count = len(facts.blocks), len(owners)
    if layers < count:
        raise ValueError(f"{layers} layers are fewer than {count} stages")
    if names or first_less is not None or last_less is not None:
        counts = stages.split_as_configured(layers, count, names=names, first_less=first_less, last_less=last_less)
    else:
        counts = balanced_layers(facts, seq_len=seq_len, count=count)
    ends = [sum(counts[: stage + 1]) for stage in range(count)]
    blocks = tuple(facts.blocks[end - size : end] for end, size in zip(ends, counts, strict=True))
    return PipelinePartition(csv or schedule, csv is not None, owners, blocks, microbatches)


def balanced_layers(facts: ModelFacts, *, seq_len: int, count: int) -> list[int]:
    """Layers of each of ``count`` stages, by cost."""
    table_params = facts.num_embedding_params
    block_params = (facts.num_params - (1 if facts.tied else 2) * table_params) / facts.num_layers
    # the convention of ModelFacts.flops_per_token: attention is not halved for causality
    attention_flops = 12 * facts.num_heads * facts.head_dim * seq_len
    costs = {"block_params": block_params, "attention_flops": attention_flops}
    return stages.split_decoder(facts.num_layers, count, **costs, table_params=table_params)


def stages_table(partition: PipelinePartition) -> Table:
    """A row per stage: its rank and its modules."""
    num_stages = len(partition.blocks)
    view = Table(title=f"stages: {num_stages} on {partition.ranks} ranks", title_justify="left")
    for column in ("stage", "rank", "layers"):
        view.add_column(column, justify="right")
    view.add_column("holds")
    for stage, blocks in enumerate(partition.blocks):
        modules = [blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]}"]
        if stage == 0:
            modules.insert(0, "embedding")
        if stage == num_stages - 1:
            modules.append("final norm, head")
        view.add_row(str(stage), str(partition.owners[stage]), str(len(blocks)), ", ".join(modules))
    return view


def schedules_table(partition: PipelinePartition) -> Table:
    """A row per schedule that these ranks and layers can run: stages, microbatches, bubble."""
    view = Table(title="schedules at unit costs: F = 1, B = 2 or I = W = 1, transfers 0", title_justify="left")
    view.add_column("schedule")
    for column in ("stages", "microbatches", "bubble"):
        view.add_column(column, justify="right")
    ranks, num_layers = partition.ranks, sum(map(len, partition.blocks))
    rows = {partition.schedule: (len(partition.blocks), partition.microbatches, partition.timeline().bubble)}
    for name, kind in SCHEDULE_KINDS.items():
        num_stages = kind.min_stages * ranks
        if name in rows or num_stages > num_layers:
            continue
        # this run's microbatches where they fill the schedule: bubbles compare only at equal batches
        is_filled = kind.is_filled_by(partition.microbatches, ranks=ranks)
        microbatches = partition.microbatches if is_filled else kind.min_microbatches(ranks)
        owners = stage_owners(kind.placement, ranks=ranks, stages=num_stages)
        orders = schedule_orders(name, owners=owners, microbatches=microbatches)
        rows[name] = num_stages, microbatches, simulate(orders, stages=num_stages).bubble
    for name, (num_stages, microbatches, bubble) in rows.items():
        mark = "this run: " if name == partition.schedule else ""
        view.add_row(mark + name, str(num_stages), str(microbatches), f"{bubble:.1%}")
    return view
