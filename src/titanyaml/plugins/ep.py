"""Expert parallelism: every rank of an ep group holds some experts of each mixture, and tokens travel to them and back.

The ep ranks are ordinary data, context and tensor ranks, each with tokens of its own. A mixture's (token, expert) pairs
are sorted by expert, hence by the rank that holds it: one all-to-all sends them there, the experts compute, a second
one brings the results back in the order in which they left. Every pair is sent, however uneven the loads; how many go
where is exchanged first, and read by the host. Gradients take the same way back (Lepikhin et al. 2020, GShard).

Parameters become DTensors on the mesh of the experts; FSDP shards them over those ranks of it that hold the same ones.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from titanyaml.config.rules.expert_parallel import check_experts
from titanyaml.distributed import compat
from titanyaml.distributed.tensor import TensorGroup, exchange_rows, local
from titanyaml.errors import Problem
from titanyaml.models.moe import Experts, take_rows
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.pipeline.split_modules import distribute_parameters, find_module


class ExpertParallel:
    """Spread the experts of every mixture over ``expert_mesh["ep"]``."""

    stage = "ep"

    def reason_off(self, ctx: Context) -> str:
        return "parallel.ep is 1" if ctx.dims.ep == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """There are experts, and they divide (``config/rules/expert_parallel.py``)."""
        refusal = check_experts(ctx.dims.ep, ctx.facts.num_experts)
        return [refusal] if refusal else []

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Shard the stacked matrices [experts, out, in] by expert.

        Raises:
            PipelineError: an earlier plugin left experts of a kind that cannot be split.
        """
        assert ctx.expert_mesh is not None, "more than one ep rank and no mesh of experts"
        mesh, facts = ctx.expert_mesh["ep"], ctx.facts
        group, spread, dense = TensorGroup.of(mesh), [], {}
        for block, layout in zip(facts.blocks, facts.layouts, strict=True):
            if not layout.experts:
                dense[block] = "a dense block"
                continue
            name = f"{block}.{layout.experts}"
            # by expert, never by feature: thin matrices would get thinner, and every token gathered on every tp rank
            module: Any = find_module(model, name, Experts, axis="ep")
            distribute_parameters(module, mesh, dict.fromkeys(("w1", "w2", "w3"), Shard(0)))
            module.__class__, module.group = SpreadExperts, group
            spread.append(name)
        plural = "s" if len(spread) > 1 else ""
        summary = (
            f"{len(spread)} mixture{plural}: {facts.num_experts // ctx.dims.ep} of {facts.num_experts} experts on each "
            f"of {ctx.dims.ep} ranks; tokens travel by two all-to-alls each way"
        )
        return model, Change(summary, spread, dense)


class SpreadExperts(Experts):
    """Some of the experts; computes the (token, expert) pairs of all ranks that belong to them."""

    group: TensorGroup

    def compute(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """As ``Experts.compute``, for this rank's M pairs, sorted by expert, and the experts of all R ranks.

        Args:
            counts_E: pairs of this rank for each expert, int64.
        """
        size = self.group.size
        sent_Re = counts_E.view(size, -1)  # R ranks of e experts each
        received_Re = exchange_rows(sent_Re, [1] * size, [1] * size, self.group)
        # the host has to know the sizes of an all-to-all: the one wait for the device in a mixture
        num_sent, num_received = (_rows_by_rank(counts_Re, len(x_MD)) for counts_Re in (sent_Re, received_Re))
        rows_PD = exchange_rows(x_MD, num_sent, num_received, self.group)  # P pairs, by rank, then by expert
        # grouped GEMMs want all pairs of an expert next to each other, whichever rank they came from
        experts_P = torch.arange(received_Re.shape[1], device=x_MD.device).repeat(size)
        order_P = experts_P.repeat_interleave(received_Re.flatten(), output_size=len(rows_PD)).argsort(stable=True)
        sorted_PD, inverse_P = take_rows(rows_PD, order_P)
        out_PD, _ = take_rows(super().compute(sorted_PD, received_Re.sum(0)), inverse_P)
        return exchange_rows(out_PD, num_received, num_sent, self.group)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        return local(self.w1), local(self.w2), local(self.w3)


def _rows_by_rank(counts_Re: Tensor, rows: int) -> list[int]:
    """Rows to or from each rank."""
    size = len(counts_Re)
    if compat.is_fake(counts_Re):  # no values to read: as if loads were even
        return [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]
    counts: list[int] = counts_Re.sum(1).tolist()
    return counts
