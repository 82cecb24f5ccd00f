"""Tables of a pipeline's stages and of the schedules that it could run, for ``runner=check``."""

from __future__ import annotations

from rich.table import Table

from titanyaml.pipeline_parallel.partition import PipelinePartition, schedule_orders
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS, stage_owners
from titanyaml.pipeline_schedule.simulate import simulate


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
        stages = kind.min_stages * ranks
        if name in rows or stages > num_layers:
            continue
        # this run's microbatches where they fill the schedule: bubbles compare only at equal batches
        is_filled = kind.is_filled_by(partition.microbatches, ranks=ranks)
        microbatches = partition.microbatches if is_filled else kind.min_microbatches(ranks)
        owners = stage_owners(kind.placement, ranks=ranks, stages=stages)
        orders = schedule_orders(name, owners=owners, microbatches=microbatches)
        rows[name] = stages, microbatches, simulate(orders, stages=stages).bubble
    for name, (stages, microbatches, bubble) in rows.items():
        mark = "this run: " if name == partition.schedule else ""
        view.add_row(mark + name, str(stages), str(microbatches), f"{bubble:.1%}")
    return view
