"""Routers of a mixture of experts, as far as the loop is concerned: the balance loss, the loads, the biases.

A router sits in blocks that may be recomputed, compiled or on another pipeline stage. A counter in its forward would
count twice, and a mutation inside a compiled block is refused. So zeros enter the forward, and their *gradients* carry
the loads and the balance loss out (``models.moe.Router``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from titanyaml.config.schema import MoE
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanyaml.models.moe import Router
    from titanyaml.models.protocol import ModelFacts


class Routing:
    """The routers of the model; ``begin`` and ``end`` enclose the backward passes of a step.

    Args:
        spec: ``model.moe``. facts: of the whole model, of which this rank may hold some blocks.
        mesh: None where one rank runs alone.
    """

    def __init__(self, model: nn.Module, spec: MoE, facts: ModelFacts, *, mesh: DeviceMesh | None, env: Env) -> None:
        self.spec, self.env = spec, env
        modules = dict(model.named_modules())
        layouts = zip(facts.blocks, facts.layouts, strict=True)
        names = [f"{block}.{layout.router}" for block, layout in layouts if layout.router]
        #: of all blocks, so that ranks agree on their number; None: on another pipeline stage
        self.routers: list[Router | None] = [cast("Router | None", modules.get(name)) for name in names]
        #: of tp peers that hold the same sequences the first one counts
        self.is_counted = mesh is None or mesh.get_local_rank("tp") == 0

    def begin(self, tokens: int) -> None:
        """Weigh the balance loss, and clear what the last step left; the loss is divided by ``tokens``."""
        for router in filter(None, self.routers):
            router.gain.fill_(self.spec.balance_loss / max(tokens, 1))
            router.load_E.grad = router.balance.grad = None

    @torch.no_grad()
    def end(self, tokens: int) -> dict[str, float]:
        """Move each bias by ``bias_rate``: up where an expert got less than the mean, down where it got more
        (Wang et al. 2024, arXiv 2408.15664).

        Returns:
            expert_load: (token, expert) pairs of the busiest expert of any block over the block's mean. balance_loss,
            where it is on: what is added to the minimised loss; the recorded ``loss`` is the cross-entropy alone.
        """
        experts = self.spec.num_experts
        empty = torch.zeros(experts + 1, device=self.env.device)
        rows = [empty if router is None else self._report(router) for router in self.routers]
        # one tensor for all blocks: one wait for the device, and one reduction
        flat = torch.stack([row.double() for row in rows]).flatten().tolist()
        table = torch.tensor(comm.sum_scalars(flat, self.env), dtype=torch.float64).view(-1, experts + 1)
        loads_LE, balance_L = table[:, :-1], table[:, -1]
        above_LE = loads_LE.mean(1, keepdim=True) - loads_LE
        for router, above_E in zip(self.routers, above_LE, strict=True):
            if router is not None and self.spec.bias_rate:
                router.bias_E.add_(above_E.sign().to(router.bias_E), alpha=self.spec.bias_rate)
        record = {"expert_load": float((loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1)).max())}
        if self.spec.balance_loss:
            record["balance_loss"] = self.spec.balance_loss * float(balance_L.sum()) / max(tokens, 1)
        return record

    def _report(self, router: Router) -> torch.Tensor:
        """This rank's part of the loads [E] and of the balance loss [1], in one tensor."""
        loads_E, balance = router.load_E.grad, router.balance.grad
        assert loads_E is not None and balance is not None, "a backward was run"
        counts_loads = self.is_counted or router.peers is not None
        return torch.cat((loads_E * counts_loads, balance.view(1) * self.is_counted))
