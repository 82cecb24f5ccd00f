"""Context parallelism: every rank holds a part of each sequence, and attention looks across the ranks.

The model's inputs are cut before its forward: tokens, labels and positions follow each other, so that rotary angles
and losses belong to the tokens that are there. Document numbers stay whole, since a mask speaks of keys that lie
elsewhere. Weights are whole on every rank; FSDP shards them over dp_shard*cp and sums their gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from titanyaml.distributed import context_parallel
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.errors import PipelineError, Problem
from titanyaml.kernels.attention import AttentionKernel, choose_attention_kernel
from titanyaml.kernels.context_attention import gathered_attention, ring_attention
from titanyaml.models.attention import Attention, Mask
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.pipeline_parallel.staged import model_parts

METHODS = ("allgather", "ring", "ulysses")


class ContextParallel:
    """Split sequences over ``mesh["cp"]``.

    Args:
        method: ``allgather``: keys and values of all ranks come at once; takes document masks. ``ring``: they go
            around, one rank's at a time (Liu et al. 2023); causal only. ``ulysses``: attention is done on all
            positions of some heads, by an all-to-all before and after it (Jacobs et al. 2023); takes document masks.
            The first two deal out positions so that causal attention is equally much work on every rank.
    """

    stage = "cp"

    def __init__(self, *, method: str = "allgather") -> None:
        self.method = method

    def reason_off(self, ctx: Context) -> str:
        """Off on one cp rank."""
        return "parallel.cp is 1" if ctx.dims.cp == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """The method exists and divides what it deals out. The rule table says the same earlier."""
        dims, facts = ctx.dims, ctx.facts
        if self.method not in METHODS:
            return [Problem("parallel.cp_method", f"is {self.method!r}", allowed=", ".join(METHODS))]
        unit = dims.cp * math.lcm(2, dims.tp)
        problems = []
        if ctx.seq_len % unit:
            problems.append(
                Problem(
                    "train.seq_len",
                    f"is {ctx.seq_len}, not a multiple of cp*lcm(2, tp) = {unit}",
                    allowed=f"multiples of {unit}",
                    hint=f"train.seq_len={-(-ctx.seq_len // unit) * unit}",
                )
            )
        if self.method == "ulysses" and facts.num_kv_heads % (ranks := dims.cp * dims.tp):
            problems.append(
                Problem(
                    "parallel.cp_method",
                    f"is ulysses, which cannot deal {facts.num_kv_heads} key/value heads to {ranks} ranks",
                    allowed="allgather, ring",
                    hint="parallel.cp_method=allgather",
                )
            )
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Cut the inputs; let attention look across.

        Raises:
            PipelineError: an earlier plugin left an attention of another kind.
        """
        assert ctx.mesh is not None, "more than one rank and no mesh"
        group = TensorGroup.of(ctx.mesh["cp"])
        kernel = choose_attention_kernel(ctx.device, ctx.compute_dtype, head_dim=ctx.facts.head_dim)
        facts = ctx.facts
        names = [f"{block}.{layout.attention}" for block, layout in zip(facts.blocks, facts.layouts, strict=True)]
        for name in names:
            module = model.get_submodule(name)
            if type(module) is not Attention:
                raise PipelineError(
                    f"{name} is a {type(module).__name__}; its sequence cannot be split",
                    key="parallel.cp",
                    hint="parallel.cp=1, or switch off the plugin that replaced it",
                )
            module.__class__, module.group, module.kernel = _CLASSES[self.method], group, kernel
            module.fused = ctx.kernels.fused
        for part in model_parts(model):
            part.register_forward_pre_hook(_TakePart(group, self.method), with_kwargs=True)
        run = "one run" if self.method == "ulysses" else "a head and a tail run"
        by = "the usual attention kernel" if self.method == "ulysses" else f"{kernel} kernels"
        return model, Change(
            f"{len(names)} attentions over cp({group.size}) by {self.method}, {by}; each rank holds "
            f"{ctx.seq_len // group.size} of {ctx.seq_len} positions, {run}",
            names,
        )


class _TakePart:
    """Hook before the model's forward: this rank's positions of tokens and labels."""

    def __init__(self, group: TensorGroup, method: str) -> None:
        self.group, self.method = group, method

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        tokens_BT = args[0] if args else kwargs.pop("tokens_BS")
        labels_BT = kwargs.get("labels_BS")
        embeds = getattr(model, "embeds", True)  # a pipeline stage after the first gets what is cut already
        place = {"rank": self.group.rank, "size": self.group.size, "device": tokens_BT.device}
        choose = context_parallel.even_positions if self.method == "ulysses" else context_parallel.head_tail_positions
        positions_S = choose((tokens_BT if embeds else labels_BT).shape[1], **place)
        mine = {
            "labels_BS": None if labels_BT is None else labels_BT[:, positions_S],
            "positions_S": positions_S,
            # after the exchange attention sees all positions, in order
            "rows_S": None if self.method == "ulysses" else positions_S,
        }
        return (tokens_BT[:, positions_S] if embeds else tokens_BT,), kwargs | mine


class GatheredAttention(Attention):
    """All keys and values at once."""

    group: TensorGroup
    kernel: AttentionKernel
    fused: bool

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        """Of this rank's queries over all keys; the mask has a row for each query and a column for each position."""
        if mask is None:
            return gathered_attention(q_BNSH, k_BKSH, v_BKSH, self.group, kernel=self.kernel, fused=self.fused)
        k_BKTH, v_BKTH = context_parallel.gather_positions(torch.cat((k_BKSH, v_BKSH), dim=1), self.group).chunk(
            2, dim=1
        )
        return super().attend(q_BNSH, k_BKTH, v_BKTH, mask)


class RingAttention(Attention):
    """Keys and values of one rank at a time."""

    group: TensorGroup
    kernel: AttentionKernel
    fused: bool

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        """Of this rank's queries over all keys, causal."""
        if mask is not None:
            raise PipelineError("ring takes no mask", key="parallel.cp_method", hint="parallel.cp_method=allgather")
        return ring_attention(q_BNSH, k_BKSH, v_BKSH, self.group, kernel=self.kernel, fused=self.fused)


class UlyssesAttention(Attention):
    """All positions of some heads."""

    group: TensorGroup
    kernel: AttentionKernel
    fused: bool

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        """Exchange, attend as one rank does, exchange back."""
        q_BNTH, k_BKTH, v_BKTH = context_parallel.sequence_to_heads((q_BNSH, k_BKSH, v_BKSH), self.group)
        return context_parallel.heads_to_sequence(super().attend(q_BNTH, k_BKTH, v_BKTH, mask), self.group)


_CLASSES = {"allgather": GatheredAttention, "ring": RingAttention, "ulysses": UlyssesAttention}
