"""Async tensor parallelism: a collective of the tp ranks and the matmul next to it run piece by piece, together.

While one slice of the sequence is multiplied the next one travels, over symmetric memory, without occupying the
compute units that a collective kernel takes (Wang et al. 2023, "Overlap communication with dependent computation via
decomposition"). Inductor puts the fused operators into the compiled graphs; this plugin tells it to, counts what was
fused and reports what was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from titanyaml.config.rules.async_tp import AUTO, OPERATORS, check_operators
from titanyaml.config.rules.view import problem
from titanyaml.distributed import async_tp_times
from titanyaml.distributed.async_tp_times import Clock, PlaceTimes
from titanyaml.distributed.graph_matmuls import CollectivePlace, block_places
from titanyaml.distributed.tensor import TensorGroup, local
from titanyaml.errors import PipelineError, Problem
from titanyaml.pipeline.protocol import Change, Context

if TYPE_CHECKING:
    from titanyaml.distributed.compat_async_tp import Fusions

_WORDS = dict(zip(OPERATORS, ("all-gather", "reduce-scatter"), strict=True))
_OFF = "compile.async_tp=false"


class AsyncTensorParallel:
    """Fuse the tp group's collectives with matmuls when the model is compiled.

    Args:
        enabled: ``compile.async_tp``.
        operators: collectives that are fused: all_gather (before a matmul), reduce_scatter (behind one); or auto alone:
            those of both kinds that are faster fused, each shape timed on these ranks first. Without a GPU nothing can
            be timed and all are fused.
        cache_dir: folder that keeps the times for the next run; None: measured anew.
    """

    stage = "async_tp"
    requires = ("tp", "compile")
    #: Milliseconds of a call, in place of the GPU's events.
    clock: Clock | None = None

    def __init__(
        self, *, enabled: bool = True, operators: Sequence[str] = OPERATORS, cache_dir: str | None = None
    ) -> None:
        self.enabled, self.cache_dir = enabled, cache_dir
        self.configured, self.auto = tuple(operators), AUTO in operators
        self.operators = OPERATORS if self.auto else self.configured

    def reason_off(self, ctx: Context) -> str:
        return "" if self.enabled else "compile.async_tp is false"

    def check(self, ctx: Context) -> list[Problem]:
        """The operators exist (``config/rules/async_tp.py``)."""
        refusal = check_operators(self.configured)
        return [refusal] if refusal else []

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Set Inductor's hook. The graphs are built by the first step.

        Raises:
            PipelineError: the hook is in use, or this release of torch lacks something.
        """
        # Inductor has a switch of its own. It fuses all or nothing, reports nothing, and returns in silence where a
        # graph is not in its form. So its hook for custom passes is used instead (distributed.compat_async_tp).
        assert ctx.mesh is not None, "more than one rank and no mesh"
        # before compilation: a pass of the compiler runs only on ranks that do not find the graph in their cache, so
        # that a measurement in it could wait for a rank that never comes
        times = self._measure(model, ctx) if self.auto else None
        wins = None if times is None else {shape: time.wins for shape, time in times.items()}
        try:
            from titanyaml.distributed import compat_async_tp  # Inductor takes seconds to import

            compat_async_tp.fuse_collectives(
                ctx.mesh["tp"].get_group().group_name, self.operators, device_type=ctx.device.type, wins=wins
            )
        except (ImportError, RuntimeError) as error:
            raise PipelineError(str(error), key="compile.async_tp", hint=_OFF) from error
        self.earlier = compat_async_tp.fusions()
        kinds = " and ".join(f"{_WORDS[operator]}s" for operator in OPERATORS if operator in self.operators)
        choice = ""
        if times is not None:
            choice = f", where that was measured to gain: {'; '.join(_describe_times(times))}"
        elif self.auto:
            choice = ", all of them, since nothing was measured"
        speed = "" if ctx.device.type == "cuda" else "; without a GPU this checks function and gains no speed"
        fused = f"{kinds} of tp({ctx.dims.tp}) will be fused with matrix products when the blocks are compiled"
        return model, Change(f"{fused}{choice}{speed}", list(ctx.facts.blocks))

    def _measure(self, model: nn.Module, ctx: Context) -> dict[CollectivePlace, PlaceTimes] | None:
        """Times of each place of the blocks; None where they cannot be measured."""
        if not self.can_measure(ctx):
            return None
        assert ctx.mesh is not None, "more than one rank and no mesh"
        # shapes follow from the matrices: a place that a graph shows and nobody timed is left unfused, and reported
        tokens = ctx.local_batch * ctx.seq_len // ctx.dims.cp
        cache = Path(self.cache_dir).expanduser().absolute() / "async_tp.json" if self.cache_dir else None
        shapes = []
        for float8 in (False, True):
            columns, rows = _features(model, ctx, float8=float8)
            shapes += block_places(tokens, ctx.facts.dim, columns, rows, float8=float8)
        return async_tp_times.measure(
            shapes,
            TensorGroup.of(ctx.mesh["tp"]),
            batch=ctx.local_batch,
            dtype=ctx.compute_dtype,
            device=ctx.device,
            cache=cache,
            clock=self.clock,
        )

    def can_measure(self, ctx: Context) -> bool:
        """Whether these ranks can be timed: they have GPUs and exist (a trace has ranks that do not)."""
        return self.clock is not None or (ctx.device.type == "cuda" and torch.distributed.get_backend() != "fake")

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Count what was fused in the graphs of the first step, and what was not, with the reason.

        Raises:
            PipelineError: nothing of a kind that was asked for was fused.
        """
        from titanyaml.distributed import compat_async_tp

        # counters of the process, also right where a graph came out of Inductor's cache and no pass ran
        counts = compat_async_tp.fusions() - self.earlier
        reasons = {reason for *_, reason in counts.unfused}
        # a measurement that speaks against fusing is a result, not a failure; but the user should know
        all_slower = self.auto and not counts.fused and compat_async_tp.SLOWER in reasons
        if all_slower:
            ctx.log.warning(
                "compile.async_tp is true and fuses NOTHING: every place was measured slower when fused; "
                f"{_OFF} is the same and starts faster"
            )
        elif problems := self._find_missing(counts):
            raise PipelineError(problems)
        fused = [
            f"{counts.fused['forward', op]} + {counts.fused['backward', op]} {_WORDS[op]}s" for op in self.operators
        ]
        nothing = "NOTHING was fused, since every place was measured slower so; " if all_slower else ""
        unfused = "; ".join(_describe_unfused(counts)) or "none"
        summary = f"fused in the compiled graphs, forward + backward: {', '.join(fused)}; left as they are: {unfused}"
        return Change(f"{nothing}{summary}", list(ctx.facts.blocks))

    def _find_missing(self, counts: Fusions) -> list[Problem]:
        """A problem for each kind that was fused nowhere; under auto only if nothing at all was fused."""
        fused = {kind for _, kind in counts.fused}
        missing = [operator for operator in self.operators if operator not in fused]
        if self.auto and len(missing) < len(self.operators):
            return []
        problems = []
        for operator in missing:
            causes = _describe_unfused(counts, operator)
            causes = causes or ["no compiled graph holds one; compile.backend=inductor is the one backend that fuses"]
            remaining = ",".join(name for name in self.operators if name != operator)
            fewer = f"compile.async_tp_ops=[{remaining}]" if remaining and not self.auto else ""
            message = f"no {_WORDS[operator]} was fused ({'; '.join(causes)})"
            problems.append(problem("compile.async_tp", message, "", fewer, _OFF))
        return problems


def _features(model: nn.Module, ctx: Context, *, float8: bool) -> tuple[set[tuple[int, ...]], set[int]]:
    """Sizes on this rank of the layers that multiply in float8, or of those that do not.

    Returns:
        Output features of the layers that read one gathered tensor; input features of layers whose outputs are summed.
    """
    columns, rows = set(), set()
    for block, layout in zip(ctx.facts.blocks, ctx.facts.layouts, strict=True):
        names = (*layout.column, *layout.row)
        layers: dict[str, Any] = {name: model.get_submodule(f"{block}.{name}") for name in names}
        chosen = {name for name, layer in layers.items() if (layer.product is not F.linear) == float8}
        shapes = {name: local(layer.weight).shape for name, layer in layers.items()}
        for entry in layout.entries:
            readers = [name for name in layout.column if name.startswith(f"{entry}.")]
            if readers and chosen.issuperset(readers):  # a mixed entry has no fused operator
                columns.add(tuple(shapes[name][0] for name in readers))
        rows |= {shapes[name][1] for name in chosen.intersection(layout.row)}
    return columns, rows


def _describe_times(times: dict[CollectivePlace, PlaceTimes]) -> list[str]:
    return [
        f"{shape} {time.apart:.3f} ms, fused {time.fused:.3f}: {'fused' if time.wins else 'left'}"
        for shape, time in times.items()
    ]


def _describe_unfused(counts: Fusions, operator: str = "") -> list[str]:
    """Collectives of one kind, or of all, that were not fused, and why."""
    lines = []
    for (side, kind, reason), number in sorted(counts.unfused.items()):
        if operator in ("", kind):
            plural = "s" if number > 1 else ""
            lines.append(f"{number} {_WORDS[kind]}{plural} {side}: {reason}")
    return lines
