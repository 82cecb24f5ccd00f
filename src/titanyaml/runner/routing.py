"""What the loop does for the routers of a mixture: weigh the balance loss, add up loads, move the biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """The routers of this rank's blocks; ``begin`` and ``end`` enclose the backward passes of a step.

    Args:
        spec: ``model.moe``. facts: of the whole model, of which this rank may hold some blocks.
        mesh: None where one rank runs alone.
    """

    def __init__(self, model: nn.Module, spec: MoE, facts: ModelFacts, *, mesh: DeviceMesh | None, env: Env) -> None:
        self.spec, self.env = spec, env
        here = dict(model.named_modules())
        names = [
            f"{block}.{layout.router}"
            for block, layout in zip(facts.blocks, facts.layouts, strict=True)
            if layout.router
        ]
        self.routers: list[Router | None] = [here.get(name) for name in names]
        #: of tp peers who hold the same sequences the first one counts
        self.first = mesh is None or mesh.get_local_rank("tp") == 0

    def begin(self, tokens: int) -> None:
        """Weigh the balance loss.

        Args:
            tokens: valid tokens of all data ranks in this step: what is differentiated is divided by them.
        """
        for router in self._mine():
            router.gain.fill_(self.spec.balance_loss / max(tokens, 1))
            router.load_E.grad = router.balance.grad = None

    @torch.no_grad()
    def end(self, tokens: int) -> dict[str, float]:
        """Move each bias by ``bias_rate``: up where an expert got less than the mean, down where it got more
        (Wang et al. 2024, arXiv 2408.15664).

        Returns:
            expert_load: pairs of the busiest expert of any block over the block's mean; balance_loss, where it is on:
            what it adds to the loss that is minimised (``loss`` does not hold it).
        """
        experts = self.spec.num_experts
        empty = torch.zeros(experts + 1, device=self.env.device)
        rows = [empty if router is None else self._report(router) for router in self.routers]
        flat = torch.stack([row.double() for row in rows]).flatten().tolist()  # one wait for the device
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
        load_E = router.load_E.grad if self.first or router.peers is not None else router.load_E.grad * 0
        return torch.cat((load_E, router.balance.grad.view(1) * self.first))

    def _mine(self) -> list[Router]:
        return [router for router in self.routers if router is not None]
