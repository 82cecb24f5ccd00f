"""One pipeline rank's stages as a module, whose parameters keep the names that they have in the whole model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanyaml.models.decoder import Decoder
from titanyaml.models.protocol import ModelFacts
from titanyaml.pipeline_parallel.execute import PipelineRuntime
from titanyaml.pipeline_parallel.partition import PipelinePartition


class StagedModel(nn.Module):
    """The stages of one pipeline rank, with the blocks of all of them as submodules; ``whole``: the model, on meta.

    Attributes:
        parts: the stages, each a module of its own. runtime: runs them.
        facts: those of the model, with this rank's blocks. elsewhere: parameters that only other ranks hold, on meta.
        shared: name of the tied weight, where the first and the last stage are on two ranks; else "".
    """

    def __init__(
        self,
        whole: Decoder,
        partition: PipelinePartition,
        *,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec, self.partition, self.rank, self.group = whole.spec, partition, rank, group
        last = len(partition.owners) - 1
        # a plain list: as submodules the stages would give every parameter a second name
        self.parts: list[Decoder] = [
            whole.part(partition.blocks[stage], embeds=stage == 0, heads=stage == last)
            for stage in partition.stages_of(rank)
        ]
        for part in self.parts:
            for name, child in part.named_children():
                # shared, not copied: a plugin that changes a block by its name changes the stage
                if not isinstance(child, nn.ModuleDict):
                    setattr(self, name, child)
                elif hasattr(self, name):  # the layers of a second stage join those of the first
                    getattr(self, name).update(child)
                else:
                    setattr(self, name, nn.ModuleDict(dict(child.items())))
        self.facts = _merged_facts(whole.facts, [part.facts for part in self.parts])
        own_names = dict(self.named_parameters()).keys()
        # optimizer groups may name parameters that are on other ranks only
        self.elsewhere = {name: p for name, p in whole.named_parameters() if name not in own_names}
        is_split = whole.facts.tied and partition.owners[0] != partition.owners[last]
        self.shared = f"{whole.facts.embedding}.weight" if is_split else ""
        self.runtime = PipelineRuntime(self.parts, partition, group=group, device=device, dtype=dtype)

    def init_buffers(self, device: torch.device, *, dtype: torch.dtype = torch.float32) -> None:
        for part in self.parts:
            part.init_buffers(device, dtype=dtype)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        # each stage has its own copy, e.g. of the rotary tables, which no submodule of this module holds
        for part in self.parts:
            yield from part.named_buffers(*args, **kwargs)

    @torch.no_grad()
    def sum_shared_gradient(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """Add up, in place, the gradients of a tied weight on two ranks; the gradients that this rank's norm counts."""
        if self.shared not in grads:
            return list(grads.values())
        grad = grads[self.shared]
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        first, last = self.partition.owners[0], self.partition.owners[-1]
        if local.numel():  # FSDP may leave this rank no row of it
            # not an all-reduce: the ranks between the ends hold no such weight. Both copies stay bit-equal, since
            # a + b is b + a in floating point
            peer = dist.get_global_rank(self.group, last if self.rank == first else first)
            peer_grad = torch.empty_like(local, memory_format=torch.contiguous_format)
            send = dist.P2POp(dist.isend, local.contiguous(), peer, self.group)
            receive = dist.P2POp(dist.irecv, peer_grad, peer, self.group)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            local += peer_grad
        return [grad for name, grad in grads.items() if name != self.shared or self.rank == first]


def _merged_facts(whole: ModelFacts, parts: Sequence[ModelFacts]) -> ModelFacts:
    """The model's facts with the blocks of these parts, and "" for an embedding, norm or head that none of them has."""
    return replace(
        whole,
        blocks=tuple(block for part in parts for block in part.blocks),
        layouts=tuple(layout for part in parts for layout in part.layouts),
        embedding=next((part.embedding for part in parts if part.embedding), ""),
        head=next((part.head for part in parts if part.head), ""),
        final_norm=next((part.final_norm for part in parts if part.final_norm), ""),
    )


def model_parts(model: nn.Module) -> list[nn.Module]:
    """The modules whose forwards run: the stages of a ``StagedModel``, else the model itself."""
    return list(model.parts) if isinstance(model, StagedModel) else [model]
