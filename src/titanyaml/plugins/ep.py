"""Expert parallelism: every rank of an ep group holds some experts of each mixture, and tokens travel to them and back.

The ep ranks are ordinary data, context and tensor ranks, each with tokens of its own. A mixture's (token, expert) pairs
are sorted by expert, hence by the rank that holds it: one all-to-all sends them there, the experts compute, a second
one brings the results back in the order in which they left. Every pair is sent, however uneven the loads; how many go
where is exchanged first, and read by the host. Gradients take the same way back (Lepikhin et al. 2020, GShard).

Parameters become DTensors on the mesh of the experts; FSDP shards them over those ranks of it that hold the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import TensorGroup, exchange_rows, local
from titanyaml.errors import PipelineError, Problem
from titanyaml.models.moe import Experts, take_rows
from titanyaml.pipeline.protocol import Change, Context


class ExpertParallel:
    """Spread the experts of every mixture over ``expert_mesh["ep"]``."""

    stage = "ep"

    def reason_off(self, ctx: Context) -> str:
        """Off on one ep rank."""
        return "parallel.ep is 1" if ctx.dims.ep == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """There are experts, and they divide. The rule table says the same earlier, with the nearest legal values."""
        experts, ep = ctx.facts.num_experts, ctx.dims.ep
        if experts and experts % ep == 0:
            return []
        return [
            Problem(
                "parallel.ep",
                f"is {ep}, and the model has {experts} experts",
                allowed="a divisor of model.moe.num_experts",
                hint="parallel.ep=1",
            )
        ]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Shard the stacked matrices by expert.

        Raises:
            PipelineError: an earlier plugin left experts of a kind that cannot be spread.
        """
        assert ctx.expert_mesh is not None, "more than one ep rank and no mesh of experts"
        mesh, facts = ctx.expert_mesh["ep"], ctx.facts
        group, done, dense = TensorGroup.of(mesh), [], {}
        for block, layout in zip(facts.blocks, facts.layouts, strict=True):
            if not layout.experts:
                dense[block] = "a dense block"
                continue
            name = f"{block}.{layout.experts}"
            module = model.get_submodule(name)
            if type(module) is not Experts:
                raise PipelineError(
                    f"{name} is a {type(module).__name__}, which cannot be spread; only Experts can",
                    key="parallel.ep",
                    hint="parallel.ep=1, or switch off the plugin that replaced it",
                )
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(module, leaf, nn.Parameter(shard, requires_grad=parameter.requires_grad))
            module.__class__, module.group = SpreadExperts, group
            done.append(name)
        each = facts.num_experts // ctx.dims.ep
        return model, Change(
            f"{len(done)} mixture{'s' * (len(done) > 1)}: {each} of {facts.num_experts} experts on each of "
            f"{ctx.dims.ep} ranks; tokens travel by two all-to-alls each way",
            done,
            dense,
        )


class SpreadExperts(Experts):
    """Some of the experts; the pairs of the whole group that belong to them."""

    group: TensorGroup

    def compute(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """As ``Experts.compute``, for this rank's pairs with the experts of all ranks."""
        size = self.group.size
        sent_Re = counts_E.view(size, -1)  # R ranks of e experts each
        got_Re = exchange_rows(sent_Re, [1] * size, [1] * size, self.group)
        there, here = (_rows_of(counts, len(x_MD)) for counts in (sent_Re, got_Re))
        rows_PD = exchange_rows(x_MD, there, here, self.group)  # P pairs, by rank, then by expert
        experts_P = torch.arange(got_Re.shape[1], device=x_MD.device).repeat(size)
        order_P = experts_P.repeat_interleave(got_Re.flatten(), output_size=len(rows_PD)).argsort(stable=True)
        sorted_PD, place_P = take_rows(rows_PD, order_P)
        out_PD, _ = take_rows(super().compute(sorted_PD, got_Re.sum(0)), place_P)
        return exchange_rows(out_PD, here, there, self.group)

    def matrices(self) -> tuple[Tensor, ...]:
        return tuple(map(local, (self.w1, self.w2, self.w3)))


def _rows_of(counts_Re: Tensor, rows: int) -> list[int]:
    """Rows to or from each rank. Of counts without values (fake tensors): as if loads were even."""
    size = len(counts_Re)
    if compat.is_fake(counts_Re):
        return [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]
    return counts_Re.sum(1).tolist()
