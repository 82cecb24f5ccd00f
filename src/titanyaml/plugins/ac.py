"""Activation checkpointing: keep less in the forward pass, compute it again in the backward pass.

The block's ``forward`` is replaced in place, so that parameter names, hooks, ``block.compile()`` and FSDP see the same
module as before: nothing of a wrapper can leak into a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanyaml.errors import PipelineError, Problem
from titanyaml.pipeline.protocol import Change, Context, some

MODES = ("none", "full", "selective_op", "selective_layer")


def _operators(*names: str) -> frozenset:
    """The aten operators of these names that this torch has."""
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(packet.default for packet in packets if packet is not None)


#: Fused attention of every backend, CPU included: cheap to keep, dear to repeat.
ATTENTION = _operators(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu",
)
MATMULS = _operators("mm", "addmm", "_scaled_mm")


class ActivationCheckpointing:
    """Recompute the decoder blocks' activations.

    Args:
        mode: ``full``: a block keeps its inputs only. ``selective_op``: it also keeps the outputs of fused attention
            (on every device, CPU included) and of every second matrix product, the 2nd, 4th, 6th, ... in order of
            execution; the rest, attention that is not a fused operator included, is recomputed. In a block of
            q, k, v, o, gate, up, down that keeps k, o and up: an odd count would keep the down projection, whose
            output no gradient needs. ``selective_layer``: as ``full``, for blocks 0, every, 2*every, ...
        every: for ``selective_layer``.

    Random numbers drawn inside a block (dropout, noise) are the same when it is recomputed.
    """

    stage = "ac"

    def __init__(self, *, mode: str, every: int = 2) -> None:
        self.mode, self.every = mode, every
        self.wrapped: dict[str, Checkpointed] = {}

    def reason_off(self, ctx: Context) -> str:
        """Off where the mode is none."""
        return "ac.mode is none" if self.mode == "none" else ""

    def check(self, ctx: Context) -> list[Problem]:
        """Mode and period are legal."""
        problems = []
        if self.mode not in MODES:
            problems.append(Problem("ac.mode", f"is {self.mode!r}", allowed=", ".join(MODES)))
        if self.every < 1:
            problems.append(Problem("ac.every", f"is {self.every}", allowed="1 or more"))
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Replace the chosen blocks' forward."""
        period = self.every if self.mode == "selective_layer" else 1
        chosen = ctx.facts.blocks[::period]
        contexts = selective_contexts if self.mode == "selective_op" else None
        for name in chosen:
            block = model.get_submodule(name)
            block.forward = self.wrapped[name] = Checkpointed(block.forward, contexts)
        kept = "fused attention and every second matrix product" if contexts else "block inputs"
        reason = f"selective_layer takes one block in {period}"
        return model, Change(
            f"{self.mode}: {len(chosen)} of {len(ctx.facts.blocks)} blocks keep {kept} and recompute the rest",
            list(chosen),
            {name: reason for name in ctx.facts.blocks if name not in chosen},
        )

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Every chosen block ran again in the backward pass.

        In a compiled block the recomputation is part of the graph and cannot be counted here.

        Raises:
            PipelineError: a block never ran again: its forward was replaced by another plugin.
        """
        again = [name for name, forward in self.wrapped.items() if forward.runs > forward.calls]
        idle = [name for name in self.wrapped if name not in again]
        traced = [name for name in idle if "compile" in ctx.active and not self.wrapped[name].calls]
        if idle != traced:
            raise PipelineError(
                f"asked for, but not recomputed in the first step: {some(idle)}",
                key="ac.mode", hint="ac=none, or find the plugin that replaced these blocks' forward",
            )
        reason = "compiled: recomputation is inside the graph, where it is not counted"
        seen = [f"{len(again)} blocks were recomputed"] if again else []
        if traced:
            seen.append(f"{len(traced)} compiled blocks recompute inside their graphs, where it is not counted")
        return Change(", ".join(seen), again, dict.fromkeys(traced, reason))


class Checkpointed:
    """A block's forward that recomputes. ``calls`` and ``runs`` count eager forwards and executions of the body.

    Copying the block copies this with it: it holds the bound method, not a closure over the block.
    """

    def __init__(self, inner: Callable[..., Any], contexts: Callable[[], Any] | None) -> None:
        self.inner = inner
        self.options = {"context_fn": contexts} if contexts else {}
        self.calls = self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=True, **self.options, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.runs += 1
        return self.inner(*args, **kwargs)


def selective_contexts() -> Any:
    """The pair of contexts for one forward of one block under ``selective_op``; the count starts anew each time."""
    products = {False: 0, True: 0}  # counted apart: torch before 2.13 asks again while it recomputes

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator in MATMULS:
            products[ctx.is_recompute] += 1
            if products[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
