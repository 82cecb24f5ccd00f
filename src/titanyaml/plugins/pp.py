"""Pipeline parallelism: the layers are cut into stages, and each rank keeps those of its own.

First of all plugins, on meta: what comes after sees this rank's blocks only, under their old names.
"""

from collections.abc import Sequence

from torch import nn

from titanyaml.config.rules import pipeline_parallel as rules
from titanyaml.config.rules.values import check_values
from titanyaml.errors import PipelineError, Problem
from titanyaml.models.decoder import Decoder
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.pipeline_parallel.partition import PipelinePartition, make_partition
from titanyaml.pipeline_parallel.staged import StagedModel


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
        return "parallel.pp is 1" if ctx.dims.pp == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """The schedule can be run with so many microbatches and layers (``config/rules/pipeline_parallel.py``)."""
        # one after the other: each check relies on the ones before it
        if problems := check_values("parallel", pp_schedule=self.schedule):
            return problems
        refusal = self._check_schedule(ctx) or self._check_stages(ctx)
        return [refusal] if refusal else self._check_backward(ctx)

    def _check_schedule(self, ctx: Context) -> Problem | None:
        ranks, microbatches = ctx.dims.pp, ctx.accumulation
        # the microbatches of a pipeline are those of gradient accumulation
        sequences = ctx.local_batch * ctx.dims.data_degree
        if self.schedule_csv is not None:
            unreadable = rules.check_file(self.schedule_csv, ranks=ranks)
            return unreadable or rules.check_file_microbatches(self.schedule_csv, microbatches, sequences=sequences)
        excess = rules.check_stages_per_rank(self.schedule, self.stages_per_rank)
        return excess or rules.check_microbatches(self.schedule, microbatches, ranks=ranks, sequences=sequences)

    def _check_stages(self, ctx: Context) -> Problem | None:
        layers, ranks, csv = len(ctx.facts.blocks), ctx.dims.pp, self.schedule_csv
        count = rules.count_stages(self.schedule, csv, self.stages_per_rank, ranks)
        assert count is not None, "the schedule was checked"
        too_few = rules.check_num_layers(layers, count, ranks=ranks, from_file=csv is not None)
        less = {"first_less": self.first_less, "last_less": self.last_less}
        return too_few or rules.check_stage_layers(layers, count, names=self.stages, **less)

    def _check_backward(self, ctx: Context) -> list[Problem]:
        fix = rules.find_whole_backward(self.schedule, self.schedule_csv)
        if not fix:
            return []
        routers = rules.check_split_routers(ctx.facts.num_experts, fix)
        nodes = [rules.refuse_split_backward(node, "on", fix) for node in ("compile", "ac") if node in ctx.active]
        return [routers, *nodes] if routers else nodes

    # every rank computes the same from the same configuration: nothing is communicated
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
        # a part of a decoder runs the same forward as the whole, so that a stage needs no class of its own
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
        own_stages = " and ".join(map(str, partition.stages_of(rank)))
        summary = (
            f"{len(partition.blocks)} stages of {layers} layers over pp({ctx.dims.pp}), {partition.schedule}, "
            f"{partition.microbatches} microbatches, bubble {partition.timeline().bubble:.1%}; "
            f"pipeline rank {rank} holds stage {own_stages}"
        )
        ends = [name for name, _ in staged.named_children() if name != "layers"]  # embedding, norm, head
        return staged, Change(summary, [*staged.facts.blocks, *ends])
