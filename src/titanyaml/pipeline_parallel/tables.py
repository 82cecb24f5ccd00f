"""Tables of a pipeline's stages and of the schedules that it could run, for ``runner=check``."""

from __future__ import annotations

from rich.table import Table

from titanyaml.pipeline_parallel.partition import PipelinePartition, named_orders
from titanyaml.pipeline_schedule.kinds import KINDS, owners
from titanyaml.pipeline_schedule.simulate import simulate


def stages_table(plan: PipelinePartition) -> Table:
    """A row per stage: its rank and what it holds."""
    view = Table(title=f"stages: {len(plan.blocks)} on {plan.ranks} ranks", title_justify="left")
    for column in ("stage", "rank", "layers"):
        view.add_column(column, justify="right")
    view.add_column("holds")
    last = len(plan.blocks) - 1
    for stage, blocks in enumerate(plan.blocks):
        ends = (
            ["embedding"] * (stage == 0),
            [blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]}"],
            ["final norm, head"] * (stage == last),
        )
        view.add_row(str(stage), str(plan.owners[stage]), str(len(blocks)), ", ".join(sum(ends, [])))
    return view


def schedules_table(plan: PipelinePartition) -> Table:
    """A row per schedule that so many ranks and layers can run: microbatches, and the share of time that ranks wait."""
    view = Table(title="schedules at unit costs: F = 1, B = 2 or I = W = 1, transfers 0", title_justify="left")
    view.add_column("schedule")
    for column in ("stages", "microbatches", "bubble"):
        view.add_column(column, justify="right")
    layers = sum(map(len, plan.blocks))
    rows = {plan.schedule: (len(plan.blocks), plan.microbatches, plan.timeline().bubble)}
    for name, kind in KINDS.items():
        stages = kind.fewest * plan.ranks
        if name in rows or stages > layers:
            continue
        filled = kind.fills(plan.microbatches, ranks=plan.ranks)
        microbatches = plan.microbatches if filled else kind.smallest(plan.ranks)
        placed = owners(kind.placement, ranks=plan.ranks, stages=stages)
        orders = named_orders(name, owners=placed, microbatches=microbatches)
        rows[name] = stages, microbatches, simulate(orders, stages=stages).bubble
    for name, (stages, microbatches, bubble) in rows.items():
        mark = "this run: " if name == plan.schedule else ""
        view.add_row(mark + name, str(stages), str(microbatches), f"{bubble:.1%}")
    return view
