"""A pipeline rank's stages of a model, in one module whose parameters have the names that they have in the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanyaml.models.decoder import Decoder
from titanyaml.pipeline_parallel.execute import Inputs, LossFunction, Runtime
from titanyaml.pipeline_parallel.partition import PipelinePartition


class Staged(nn.Module):
    """What one rank holds. Its stages share their modules with it: what a plugin does to a block by its name is done to
    the stage; what it does to a forward of the model it does to each of ``parts``.

    Args:
        whole: the model, on meta. plan: the pipeline. rank: this rank's place in it.

    Attributes:
        parts: the stages, each a module of its own; they are no submodules, their modules are.
        facts: those of the model, with this rank's blocks. elsewhere: parameters that only other ranks hold, on meta.
        shared: name of the parameter that the first and the last stage hold on two ranks; "" where there is none.
    """

    def __init__(
        self,
        whole: Decoder,
        plan: PipelinePartition,
        *,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec, self.plan, self.rank, self.group = whole.spec, plan, rank, group
        self.device, self.dtype = device, dtype
        last = len(plan.owners) - 1
        self.parts: list[Decoder] = [
            whole.part(plan.blocks[stage], embeds=stage == 0, heads=stage == last) for stage in plan.stages_of(rank)
        ]
        for part in self.parts:
            for name, child in part.named_children():
                if isinstance(child, nn.ModuleDict) and hasattr(self, name):
                    getattr(self, name).update(child)
                else:
                    setattr(self, name, nn.ModuleDict(child) if isinstance(child, nn.ModuleDict) else child)
        first_of = {
            name: next((got for part in self.parts if (got := getattr(part.facts, name))), "")
            for name in ("embedding", "head", "final_norm")
        }
        self.facts = replace(
            whole.facts,
            blocks=tuple(block for part in self.parts for block in part.facts.blocks),
            layouts=tuple(layout for part in self.parts for layout in part.facts.layouts),
            **first_of,
        )
        here = dict(self.named_parameters())
        self.elsewhere = {name: p for name, p in whole.named_parameters() if name not in here}
        apart = whole.facts.tied and plan.owners[0] != plan.owners[last]
        self.shared = f"{whole.facts.embedding}.weight" if apart else ""
        self._runtime: Runtime | None = None

    def init_buffers(self, device: torch.device, *, dtype: torch.dtype = torch.float32) -> None:
        """Fill those of the stages, which are not submodules."""
        for part in self.parts:
            part.init_buffers(device, dtype=dtype)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the stages, each of which has its own."""
        for part in self.parts:
            yield from part.named_buffers(*args, **kwargs)

    @property
    def runtime(self) -> Runtime:
        """The stages as they run; made when first asked for, which is after all plugins."""
        if self._runtime is None:
            self._runtime = Runtime(self.parts, self.plan, group=self.group, device=self.device, dtype=self.dtype)
        return self._runtime

    def train_step(self, inputs: Sequence[Inputs], *, loss_fn: LossFunction, divisor: int) -> Tensor:
        """``Runtime.train``."""
        return self.runtime.train(inputs, loss_fn=loss_fn, divisor=divisor)

    def evaluate(self, inputs: Sequence[Inputs], *, loss_fn: LossFunction) -> Tensor:
        """``Runtime.evaluate``."""
        return self.runtime.evaluate(inputs, loss_fn=loss_fn)

    @torch.no_grad()
    def settle(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """Add up the gradients of a weight that both ends hold; bit-equal on both, since a + b is b + a.

        Returns:
            The gradients that count in a norm on this rank: the shared one counts where the first stage is.
        """
        if self.shared not in grads:
            return list(grads.values())
        grad = grads[self.shared]
        mine = grad.to_local() if isinstance(grad, DTensor) else grad
        first, last = self.plan.owners[0], self.plan.owners[-1]
        if mine.numel():
            peer = dist.get_global_rank(self.group, last if self.rank == first else first)
            other = torch.empty_like(mine, memory_format=torch.contiguous_format)
            transfers = [
                dist.P2POp(dist.isend, mine.contiguous(), peer, self.group),
                dist.P2POp(dist.irecv, other, peer, self.group),
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            mine += other
        return [one for name, one in grads.items() if name != self.shared or self.rank == first]


def parts(model: nn.Module) -> list[nn.Module]:
    """The modules whose forwards are the model's: its stages, or itself."""
    return list(model.parts) if isinstance(model, Staged) else [model]
