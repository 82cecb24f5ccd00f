"""Activation checkpointing: keep less in the forward pass, recompute it in the backward pass.

The block's ``forward`` is replaced in place, so that parameter names, hooks, ``block.compile()`` and FSDP see the same
module as before: no wrapper's name can get into a checkpoint.
"""

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
from titanyaml.config.rules.activation_checkpointing import check_budget
from titanyaml.config.rules.values import check_values
from titanyaml.config.rules.view import problem
from titanyaml.distributed import compat, compat_compile
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.errors import PipelineError, Problem
from titanyaml.models import grouped  # noqa: F401 - registers its operators
from titanyaml.pipeline.protocol import Change, Context, first_names


def _operators(namespace: Any, *names: str) -> frozenset[Any]:
    """Those of the operators that this release of torch has in a namespace of ``torch.ops``."""
    packets = [getattr(namespace, name, None) for name in names]
    return frozenset(getattr(packet, "default", packet) for packet in packets if packet is not None)


#: Fused attention of every backend, CPU included: its output is cheap to keep, and dear to compute again.
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
    | _operators(torch.ops.titanyaml, "context_attention")
)
#: Matmuls in bfloat16, in float8 (both generations of the operator), and of one matrix per expert. The loop that stands
#: for grouped GEMMs on a CPU counts too: a CPU keeps what a GPU keeps, so that traces on a CPU are right for a GPU.
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
#: Collectives whose result is no larger than the output of the matmul in front of them. Kept in its place, a scattered
#: sum takes 1/tp of its memory and spares a transfer.
TRANSFERS = _operators(compat.COLLECTIVES, "reduce_scatter_tensor", "all_to_all_single")
_KEPT = {
    kept_matmuls.NONE: "no matrix product",
    kept_matmuls.HALF: "every second matrix product",
    kept_matmuls.ALL: "every matrix product",
}


class ActivationCheckpointing:
    """Recompute the decoder blocks' activations.

    Args:
        mode: ``full``: a block keeps its inputs only. ``selective_op``: it also keeps the outputs of fused attention,
            of every second matmul (the 2nd, 4th, 6th, ... in order of execution), and of tp's reduce-scatters and cp's
            all-to-alls. ``selective_layer``: as ``full``, for blocks 0, every, 2*every, ... ``memory_budget``:
            torch.compile's partitioner chooses, in each compiled graph, what costs the least to recompute such that
            what is kept fits into the budget.
        every: for ``selective_layer``.
        keep_products: for ``selective_op``, kept matmul outputs as a share of all. Above 0.5 some blocks keep every one
            (but a last one whose output no gradient needs), below 0.5 some keep none; evenly spread.
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
        self.forwards: dict[str, RecomputedForward] = {}  # by block

    def reason_off(self, ctx: Context) -> str:
        return "ac.mode is none" if self.mode == "none" else ""

    def check(self, ctx: Context) -> list[Problem]:
        """Mode, period and shares are legal; a budget is kept by the compiler."""
        problems = check_values(
            "ac", mode=self.mode, every=self.every, budget=self.budget, keep_products=self.keep_products
        )
        if self.mode == "auto":
            problems.append(problem("ac.mode", "is auto, which runner/auto_ac.py replaces by another mode before"))
        uncompiled = "" if "compile" in ctx.active else "nothing is compiled"
        if refusal := check_budget(self.mode, uncompiled, "ac=selective_op"):
            problems.append(refusal)
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Replace the chosen blocks' forward, or tell the compiler its budget."""
        if self.mode == "memory_budget":
            compat_compile.set_activation_memory_budget(self.budget)
            summary = f"memory_budget: each compiled graph may keep {self.budget:.0%} of its activations"
            return model, Change(summary, list(ctx.facts.blocks))
        period = self.every if self.mode == "selective_layer" else 1
        chosen = ctx.facts.blocks[::period]
        outputs = "block inputs"
        if self.mode == "selective_op":
            compat.ignore_profiler_ops_in_recomputation()
            outputs = self._keep_operators(model, ctx)
        else:
            for name in chosen:
                self._replace_forward(model, name, None)
        reason = f"selective_layer takes one block in {period}"
        skipped = {name: reason for name in ctx.facts.blocks if name not in chosen}
        summary = f"{self.mode}: {len(chosen)} of {len(ctx.facts.blocks)} blocks keep {outputs} and recompute the rest"
        return model, Change(summary, list(chosen), skipped)

    def _replace_forward(self, model: nn.Module, name: str, contexts: Callable[[], Any] | None) -> None:
        block: Any = model.get_submodule(name)
        block.forward = self.forwards[name] = RecomputedForward(block.forward, contexts)

    def _keep_operators(self, model: nn.Module, ctx: Context) -> str:
        """Have every block keep the outputs of some operators; returns which."""
        levels = kept_matmuls.block_levels(self.keep_products, blocks=len(ctx.facts.blocks))
        groups = _transfer_groups(ctx)
        # blocks that keep the same share one object, and so one compiled graph
        make_contexts = functools.cache(lambda *options: functools.partial(selective_contexts, groups, *options))
        for name, level in zip(ctx.facts.blocks, levels, strict=True):
            # above HALF the count reaches the matmul whose output no gradient needs; HALF never keeps it
            idle = _idle_matmul(model.get_submodule(name)) if level == kept_matmuls.ALL else 0
            self._replace_forward(model, name, make_contexts(level, idle))
        matmuls = _describe_levels(levels)
        if groups:
            return f"fused attention, {matmuls} and what tp and cp peers sent"
        return f"fused attention and {matmuls}"

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Every chosen block ran again in the backward pass.

        In a compiled block the recomputation is part of the graph and cannot be counted here.

        Raises:
            PipelineError: a block never ran again: its forward was replaced by another plugin. Or something changed
                the compiler's budget.
        """
        if self.mode == "memory_budget":
            return self._verify_budget(ctx)
        recomputed = [name for name, forward in self.forwards.items() if forward.num_runs > forward.num_calls]
        idle = [name for name in self.forwards if name not in recomputed]
        compiled = [name for name in idle if "compile" in ctx.active and not self.forwards[name].num_calls]
        if idle != compiled:
            raise PipelineError(
                f"asked for, but not recomputed in the first step: {first_names(idle)}",
                key="ac.mode",
                hint="ac=none, or find the plugin that replaced these blocks' forward",
            )
        reason = "compiled: recomputation is inside the graph, where it is not counted"
        notes = [f"{len(recomputed)} blocks were recomputed"] if recomputed else []
        if compiled:
            notes.append(f"{len(compiled)} compiled blocks recompute inside their graphs, where it is not counted")
        return Change(", ".join(notes), recomputed, dict.fromkeys(compiled, reason))

    def _verify_budget(self, ctx: Context) -> Change:
        # the budget is a setting of the process, which anything may have changed before the graphs were compiled
        budget = compat_compile.activation_memory_budget()
        if budget != self.budget:
            raise PipelineError(
                f"asked for, but the compiler was given another budget since ({budget:g})",
                key="ac.budget",
                hint=f"ac.budget={budget:g}, or find the plugin that changed it",
            )
        reason = "compiled: the partitioner recomputes inside the graph, where it is not counted"
        summary = f"graphs were compiled under a budget of {self.budget:g}"
        return Change(summary, [], dict.fromkeys(ctx.facts.blocks, reason))


class RecomputedForward:
    """A block's forward that recomputes.

    ``num_calls`` counts eager forwards, ``num_runs`` executions of the body: recomputation makes them differ.
    """

    # not a closure over the block, but its bound method: copying the block copies this with it
    def __init__(self, inner: Callable[..., Any], contexts: Callable[[], Any] | None) -> None:
        self.inner, self.contexts = inner, contexts
        # torch 2.11 marks only what Dynamo sees as the block's own operators: what an autograd.Function computes would
        # be kept. A policy that recomputes everything marks every operator. Later releases do so by themselves.
        self.compiled_contexts = contexts
        if contexts is None and not compat_compile.recomputes_autograd_functions():
            self.compiled_contexts = full_contexts
        self.num_calls = self.num_runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contexts = self.compiled_contexts
        if not torch.compiler.is_compiling():
            contexts = self.contexts
            self.num_calls += 1
        # policies need the variant without reentrant autograd; the random state is kept, so that dropout or noise in a
        # block is the same when it is recomputed
        options: dict[str, Any] = {"context_fn": contexts} if contexts else {}
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.num_runs += 1
        return self.inner(*args, **kwargs)


def _transfer_groups(ctx: Context) -> frozenset[str]:
    """Names of the tp and cp groups, whose transfers are not repeated under ``selective_op``."""
    if ctx.mesh is None:
        return frozenset()
    degrees = {"tp": ctx.dims.tp, "cp": ctx.dims.cp}
    return frozenset(TensorGroup.of(ctx.mesh[axis]).name for axis, degree in degrees.items() if degree > 1)


def _idle_matmul(block: nn.Module) -> int:
    """Number, from 1, of the matmul whose output no gradient needs; 0: there is none."""
    # It is the feed-forward's last one: the block adds its output to the residual stream as it is. Outputs of experts
    # (three dimensions: stacked) are weighed before they are added, so that the weights' gradients need them.
    matrices = [parameter for parameter in block.parameters() if parameter.ndim > 1]
    return len(matrices) if matrices[-1].ndim == 2 else 0


def _describe_levels(levels: list[int]) -> str:
    counts = Counter(levels)
    if len(counts) == 1:
        return _KEPT[levels[0]]
    return " or ".join(f"{_KEPT[level]} (in {counts[level]})" for level in sorted(counts))


def full_contexts() -> Any:
    """The pair of contexts for a compiled block of which nothing is kept."""
    return create_selective_checkpoint_contexts(_recompute)


def _recompute(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts(groups: frozenset[str] = frozenset(), level: int = kept_matmuls.HALF, idle: int = 0) -> Any:
    """The pair of contexts for one forward of one block under ``selective_op``; the count starts anew each time.

    Args:
        groups: process groups of which received tensors are kept (``TRANSFERS``).
        level: of kept matmuls: ``kept_matmuls.NONE``, ``HALF`` or ``ALL``. idle: the one (from 1) that ALL leaves out.
    """
    # In a block of q, k, v, o, gate, up, down the even ones are k, o and up. Odd ones would include the down
    # projection, whose output no gradient needs.
    counts = {False: 0, True: 0}  # forward and recomputation apart: torch before 2.13 asks in both

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in ATTENTION or (operator in TRANSFERS and args[-1] in groups):
            return CheckpointPolicy.MUST_SAVE
        if operator in MATMULS:
            counts[ctx.is_recompute] += 1
            number = counts[ctx.is_recompute]
            is_kept = number != idle if level == kept_matmuls.ALL else number % 2 == 0 and level == kept_matmuls.HALF
            if is_kept:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
