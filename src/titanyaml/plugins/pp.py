"""Pipeline parallelism: the layers are cut into stages, and each rank keeps those of its own.

First of all plugins, on meta: what comes after sees this rank's blocks only, under their old names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from titanyaml.errors import PipelineError, Problem
from titanyaml.models.decoder import Decoder
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.pipeline_parallel.partition import PipelinePartition, make_partition
from titanyaml.pipeline_parallel.staged import StagedModel
from titanyaml.pipeline_schedule import actions
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS
from titanyaml.pipeline_schedule.validate import first_violation

#: Nodes that take a backward as one, and why.
_WHOLE_BACKWARD = {
    "compile": "and that of a compiled block is one graph",
    "ac": "for which torch would recompute a block ten times",
}


class PipelineParallel:
    """Split the model over ``mesh["pp"]``.

    Args:
        schedule: name of torch's schedule. schedule_csv: file of another one, in its place.
        stages_per_rank: None: the fewest that the schedule can run.
        stages: layers of each stage or the first layer of each; empty: by cost.
        first_less, last_less: layers by which the ends fall short of an even share; None for both: by cost.
    """

    stage = "pp"

    def __init__(
        self,
        *,
        schedule: str = "1F1B",
        schedule_csv: str | None = None,
        stages_per_rank: int | None = None,
        stages: Sequence[str] = (),
        first_less: int | None = None,
        last_less: int | None = None,
    ) -> None:
        self.schedule, self.schedule_csv, self.stages_per_rank = schedule, schedule_csv, stages_per_rank
        self.stages, self.first_less, self.last_less = stages, first_less, last_less

    def reason_off(self, ctx: Context) -> str:
        """Off on one pp rank."""
        return "parallel.pp is 1" if ctx.dims.pp == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """The schedule can be run with so many microbatches and layers. The rule table says the same earlier."""
        try:
            violation = self._violation(ctx)
            partition = None if violation else self._partition(ctx)
        except (OSError, ValueError) as error:
            violation, partition = str(error), None
        if violation:
            return [Problem("parallel.pp_schedule_csv" if self.schedule_csv else "parallel.pp_schedule", violation)]
        if not any(action.kind == "I" for order in partition.orders() for action in order):
            return []
        routers = (
            [
                Problem(
                    "parallel.pp_schedule",
                    "runs each backward in two parts, in which routers cannot report",
                    hint="parallel.pp_schedule=Interleaved1F1B",
                )
            ]
            if ctx.facts.num_experts
            else []
        )
        return routers + [
            Problem(
                f"{node}.mode",
                f"is on, but the schedule runs each backward in two parts, {why}",
                hint=f"{node}=none or parallel.pp_schedule=Interleaved1F1B",
            )
            for node, why in _WHOLE_BACKWARD.items()
            if node in ctx.active
        ]

    def _violation(self, ctx: Context) -> str:
        ranks, microbatches = ctx.dims.pp, ctx.accumulation
        if self.schedule_csv is not None:
            grid = actions.read(Path(self.schedule_csv).expanduser())
            if violation := first_violation(grid, ranks=ranks):
                return f"{self.schedule_csv}: {violation}"
            needed = actions.microbatches(grid)
            return "" if needed == microbatches else f"runs {needed} microbatches, not {microbatches}"
        kind = SCHEDULE_KINDS.get(self.schedule)
        if kind is None:
            return f"is {self.schedule!r}; there are {', '.join(SCHEDULE_KINDS)}"
        if not kind.allows_stages(kind.stages_per_rank(self.stages_per_rank)):
            return f"{kind.name} cannot run {self.stages_per_rank} stages on a rank"
        if not kind.is_filled_by(microbatches, ranks=ranks):
            return f"{microbatches} microbatches do not fill {kind.name} on {ranks} ranks"
        return ""

    def _partition(self, ctx: Context) -> PipelinePartition:
        return make_partition(
            ctx.facts,
            seq_len=ctx.seq_len,
            ranks=ctx.dims.pp,
            microbatches=ctx.accumulation,
            schedule=self.schedule,
            csv=self.schedule_csv,
            per_rank=self.stages_per_rank,
            names=self.stages,
            first_less=self.first_less,
            last_less=self.last_less,
        )

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Keep this rank's stages.

        Raises:
            PipelineError: an earlier plugin replaced the decoder, which is what can be cut.
        """
        if type(model) is not Decoder:
            raise PipelineError(
                f"the model is a {type(model).__name__}; only a Decoder can be cut into stages",
                key="parallel.pp",
                hint="parallel.pp=1",
            )
        assert ctx.mesh is not None, "more than one rank and no mesh"
        rank, partition = ctx.mesh.get_local_rank("pp"), self._partition(ctx)
        staged = StagedModel(
            model, partition, rank=rank, group=ctx.mesh.get_group("pp"), device=ctx.device, dtype=ctx.compute_dtype
        )
        layers = ", ".join(str(len(blocks)) for blocks in partition.blocks)
        mine = " and ".join(map(str, partition.stages_of(rank)))
        return staged, Change(
            f"{len(partition.blocks)} stages of {layers} layers over pp({ctx.dims.pp}), {partition.schedule}, "
            f"{partition.microbatches} microbatches, bubble {partition.timeline().bubble:.1%}; pipeline rank {rank} holds stage "
            f"{mine}",
            list(staged.facts.blocks) + [name for name, _ in staged.named_children() if name != "layers"],
        )
