"""Activation checkpointing: keep less in the forward pass, compute it again in the backward pass.

The block's ``forward`` is replaced in place, so that parameter names, hooks, ``block.compile()`` and FSDP see the same
module as before: nothing of a wrapper can leak into a checkpoint.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention  # noqa: F401 - registers its operator
import torch.nn.attention.varlen  # noqa: F401 - the same
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import titanyaml.kernels.context_attention  # noqa: F401 - registers its operator
from titanyaml.config import kept_matmuls
from titanyaml.distributed import compat, compat_compile
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.errors import PipelineError, Problem
from titanyaml.models import grouped  # noqa: F401 - registers its operators
from titanyaml.pipeline.protocol import Change, Context, first_names

MODES = ("none", "full", "selective_op", "selective_layer", "memory_budget")


def _operators(space: Any, *names: str) -> frozenset:
    """The operators of these names that this torch has in a namespace of ``torch.ops``."""
    packets = [getattr(space, name, None) for name in names]
    return frozenset(getattr(packet, "default", packet) for packet in packets if packet is not None)


#: Fused attention of every backend, CPU included: cheap to keep, dear to repeat.
ATTENTION = (
    _operators(
        torch.ops.aten,
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    )
    | _operators(torch.ops.higher_order, "flex_attention")
    | _operators(torch.ops.torch_attn, "_varlen_attn")
)
ATTENTION |= _operators(torch.ops.titanyaml, "context_attention")
#: Products of two matrices: bfloat16, float8 (both generations of the operator), and of one matrix per expert, by
#: torch's kernel or by the loop that stands for it elsewhere.
MATMULS = _operators(
    torch.ops.aten,
    "mm",
    "addmm",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
) | _operators(torch.ops.titanyaml, "grouped_rows")
#: Transfers whose result is no larger than what a product in front of them made: a scattered sum, an exchange of heads.
TRANSFERS = _operators(torch.ops._c10d_functional, "reduce_scatter_tensor", "all_to_all_single")
_KEPT = {
    kept_matmuls.NONE: "no matrix product",
    kept_matmuls.HALF: "every second matrix product",
    kept_matmuls.ALL: "every matrix product",
}


class ActivationCheckpointing:
    """Recompute the decoder blocks' activations.

    Args:
        mode: ``full``: a block keeps its inputs only. ``selective_op``: it also keeps the outputs of fused attention
            (on every device, CPU included) and of every second matrix product, the 2nd, 4th, 6th, ... in order of
            execution, and what tp ranks reduce-scatter and cp ranks exchange; the rest, attention that is not a fused
            operator included, is recomputed. In a block of
            q, k, v, o, gate, up, down that keeps k, o and up: an odd count would keep the down projection, whose
            output no gradient needs. ``selective_layer``: as ``full``, for blocks 0, every, 2*every, ...
            ``memory_budget``: torch.compile's partitioner chooses, in each compiled graph, what costs the least to
            recompute such that what is kept fits into the budget.
        every: for ``selective_layer``.
        keep_products: for ``selective_op``, kept products as a share of all. Above 0.5 some blocks keep every one but
            a last one whose output no gradient needs, below 0.5 some keep none; evenly spread, the others as at 0.5.
        budget: for ``memory_budget``, kept bytes as a share of what the graph would keep without recomputation; 0 is
            as ``full``.
        memory_gib: key of the same group by which ``auto`` is replaced by one of these modes before the pipeline is
            built (``runner/auto_ac.py``).

    Random numbers drawn inside a block (dropout, noise) are the same when it is recomputed.
    """

    stage = "ac"

    def __init__(
        self,
        *,
        mode: str,
        every: int = 2,
        budget: float = 0.8,
        keep_products: float = 0.5,
        memory_gib: float | None = None,
    ) -> None:
        self.mode, self.every, self.budget, self.keep_products = mode, every, budget, keep_products
        self.wrapped: dict[str, Checkpointed] = {}

    def reason_off(self, ctx: Context) -> str:
        """Off where the mode is none."""
        return "ac.mode is none" if self.mode == "none" else ""

    def check(self, ctx: Context) -> list[Problem]:
        """Mode, period and shares are legal; a budget is kept by the compiler."""
        problems = []
        if self.mode not in MODES:
            problems.append(Problem("ac.mode", f"is {self.mode!r}", allowed=", ".join(MODES)))
        if self.every < 1:
            problems.append(Problem("ac.every", f"is {self.every}", allowed="1 or more"))
        if not 0 <= self.budget < 1:
            problems.append(Problem("ac.budget", f"is {self.budget}", allowed="0 or more, below 1"))
        if not 0 <= self.keep_products <= 1:
            problems.append(Problem("ac.keep_products", f"is {self.keep_products}", allowed="0 .. 1"))
        if self.mode == "memory_budget" and "compile" not in ctx.active:
            problems.append(
                Problem(
                    "ac.mode",
                    "is 'memory_budget', which the compiler keeps, but nothing is compiled",
                    hint="compile=block or ac=selective_op",
                )
            )
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Replace the chosen blocks' forward, or tell the compiler its budget."""
        if self.mode == "memory_budget":
            compat_compile.set_activation_memory_budget(self.budget)
            summary = f"memory_budget: each compiled graph may keep {self.budget:.0%} of its activations"
            return model, Change(summary, list(ctx.facts.blocks))
        period = self.every if self.mode == "selective_layer" else 1
        chosen = ctx.facts.blocks[::period]
        levels = kept_matmuls.block_levels(self.keep_products, blocks=len(chosen))
        groups = _groups(ctx)
        selective = self.mode == "selective_op"
        if selective:
            compat.ignore_profiler_ops_in_recomputation()
        # blocks that keep the same share one object, and so one compiled graph
        shared = functools.cache(lambda *how: functools.partial(selective_contexts, groups, *how))
        for name, keeps in zip(chosen, levels, strict=True):
            block = model.get_submodule(name)
            contexts = shared(keeps, _idle(block) if keeps == kept_matmuls.ALL else 0) if selective else None
            block.forward = self.wrapped[name] = Checkpointed(block.forward, contexts)
        kept = "block inputs"
        if selective:
            peers = " and".join(("", " what tp and cp peers sent") if groups else ("",))
            kept = f"fused attention{',' if peers else ' and'} {_told(levels)}{peers}"
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
            PipelineError: a block never ran again: its forward was replaced by another plugin. Or something changed
                the compiler's budget.
        """
        if self.mode == "memory_budget":
            return self._verify_budget(ctx)
        again = [name for name, forward in self.wrapped.items() if forward.runs > forward.calls]
        idle = [name for name in self.wrapped if name not in again]
        traced = [name for name in idle if "compile" in ctx.active and not self.wrapped[name].calls]
        if idle != traced:
            raise PipelineError(
                f"asked for, but not recomputed in the first step: {first_names(idle)}",
                key="ac.mode",
                hint="ac=none, or find the plugin that replaced these blocks' forward",
            )
        reason = "compiled: recomputation is inside the graph, where it is not counted"
        seen = [f"{len(again)} blocks were recomputed"] if again else []
        if traced:
            seen.append(f"{len(traced)} compiled blocks recompute inside their graphs, where it is not counted")
        return Change(", ".join(seen), again, dict.fromkeys(traced, reason))

    def _verify_budget(self, ctx: Context) -> Change:
        now = compat_compile.activation_memory_budget()
        if now != self.budget:
            raise PipelineError(
                f"asked for, but the compiler was given another budget since ({now:g})",
                key="ac.budget",
                hint=f"ac.budget={now:g}, or find the plugin that changed it",
            )
        reason = "compiled: the partitioner recomputes inside the graph, where it is not counted"
        summary = f"graphs were compiled under a budget of {self.budget:g}"
        return Change(summary, [], dict.fromkeys(ctx.facts.blocks, reason))


class Checkpointed:
    """A block's forward that recomputes. ``calls`` and ``runs`` count eager forwards and executions of the body.

    Copying the block copies this with it: it holds the bound method, not a closure over the block.
    """

    def __init__(self, inner: Callable[..., Any], contexts: Callable[[], Any] | None) -> None:
        self.inner, self.contexts = inner, contexts
        self.compiled = contexts or (None if compat_compile.recomputes_autograd_functions() else full_contexts)
        self.calls = self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contexts = self.compiled
        if not torch.compiler.is_compiling():
            contexts = self.contexts
            self.calls += 1
        options = {"context_fn": contexts} if contexts else {}
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.runs += 1
        return self.inner(*args, **kwargs)


def _groups(ctx: Context) -> frozenset[str]:
    """Names of the tp and cp groups, whose transfers are not repeated under ``selective_op``."""
    if ctx.mesh is None:
        return frozenset()
    degrees = {"tp": ctx.dims.tp, "cp": ctx.dims.cp}
    return frozenset(TensorGroup.of(ctx.mesh[axis]).name for axis, degree in degrees.items() if degree > 1)


def full_contexts() -> Any:
    """The pair of contexts for a compiled block of which nothing is kept, where torch needs one
    (``compat_compile.recomputes_autograd_functions``)."""
    return create_selective_checkpoint_contexts(_recompute)


def _recompute(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _idle(block: nn.Module) -> int:
    """The product (counted from 1) whose output no gradient needs: that of a feed-forward's last matrix, which the
    block's sum takes as it is; 0: none, since results of experts are weighed before they are added."""
    matrices = [parameter for parameter in block.parameters() if parameter.ndim > 1]
    return len(matrices) if matrices[-1].ndim == 2 else 0


def _told(levels: list[int]) -> str:
    counts = Counter(levels)
    if len(counts) == 1:
        return _KEPT[levels[0]]
    return " or ".join(f"{_KEPT[level]} (in {counts[level]})" for level in sorted(counts))


def selective_contexts(groups: frozenset[str] = frozenset(), keeps: int = kept_matmuls.HALF, idle: int = 0) -> Any:
    """The pair of contexts for one forward of one block under ``selective_op``; the count starts anew each time.

    Args:
        groups: process groups of which the received tensors are kept (``TRANSFERS``).
        keeps: of matrix products: ``kept_matmuls.NONE``, ``HALF`` or ``ALL``. idle: the one (from 1) that is not kept then.
    """
    counts = {False: 0, True: 0}  # counted apart: torch before 2.13 asks again while it recomputes

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in ATTENTION or (operator in TRANSFERS and args[-1] in groups):
            return CheckpointPolicy.MUST_SAVE
        if operator in MATMULS:
            counts[ctx.is_recompute] += 1
            number = counts[ctx.is_recompute]
            if (keeps == kept_matmuls.ALL and number != idle) or (keeps == kept_matmuls.HALF and number % 2 == 0):
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
