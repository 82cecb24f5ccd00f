"""Async tensor parallelism: a transfer of the tp group and the matrix product next to it run piece by piece, together.

While one slice of the sequence is multiplied the next one travels, over symmetric memory, without occupying the
compute units that a collective kernel takes (Wang et al. 2023, "Overlap communication with dependent computation via
decomposition"). Inductor puts the fused operators into the compiled graphs; this plugin tells it to, counts what came
of it and says what was left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from titanyaml.distributed import async_tp_times
from titanyaml.distributed.async_tp_times import Clock, PlaceTimes
from titanyaml.distributed.collective_places import CollectivePlace, block_places
from titanyaml.distributed.tensor import TensorGroup, local
from titanyaml.errors import PipelineError, Problem
from titanyaml.pipeline.protocol import Change, Context

if TYPE_CHECKING:
    from titanyaml.distributed.compat_async_tp import Fusions

OPERATORS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
#: In place of kinds: what was measured to gain.
AUTO = "auto"


class AsyncTensorParallel:
    """Fuse the tp group's collectives with matrix products when the model is compiled.

    Args:
        enabled: whether to.
        operators: kinds of collectives that are fused: all_gather (before a product), reduce_scatter (behind one); or
            auto alone: those of both kinds that are faster fused, each shape timed on these ranks first. Without a
            GPU nothing can be timed and all are fused.
        cache_dir: folder that keeps the times for the next run; None: they are taken anew.
    """

    stage = "async_tp"
    requires = ("tp", "compile")
    #: Milliseconds of a call, in place of the GPU's events.
    clock: Clock | None = None

    def __init__(
        self, *, enabled: bool = True, operators: Sequence[str] = tuple(OPERATORS), cache_dir: str | None = None
    ) -> None:
        self.enabled, self.cache_dir = enabled, cache_dir
        self.auto = AUTO in operators
        self.typed, self.operators = tuple(operators), tuple(OPERATORS) if self.auto else tuple(operators)

    def reason_off(self, ctx: Context) -> str:
        """Off where it was not asked for."""
        return "" if self.enabled else "compile.async_tp is false"

    def check(self, ctx: Context) -> list[Problem]:
        """There is something to fuse."""
        if self.typed == (AUTO,) or (self.typed and set(self.typed) <= set(OPERATORS)):
            return []
        return [
            Problem(
                "compile.async_tp_ops",
                f"is {list(self.typed)}",
                allowed=f"some of {', '.join(OPERATORS)}; or {AUTO} alone",
                hint=f"compile.async_tp_ops=[{','.join(OPERATORS)}] or compile.async_tp_ops=[{AUTO}]",
            )
        ]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Set Inductor's hook. The graphs are built by the first step.

        Raises:
            PipelineError: the hook is in use, or this release of torch lacks something.
        """
        assert ctx.mesh is not None, "more than one rank and no mesh"
        times = self._times(model, ctx) if self.auto else None
        wins = None if times is None else {place: time.wins for place, time in times.items()}
        try:
            from titanyaml.distributed import compat_async_tp  # Inductor takes seconds to import

            compat_async_tp.fuse_collectives(
                ctx.mesh["tp"].get_group().group_name, self.operators, device_type=ctx.device.type, wins=wins
            )
        except (ImportError, RuntimeError) as error:
            raise PipelineError(str(error), key="compile.async_tp", hint="compile.async_tp=false") from error
        self.earlier = compat_async_tp.fusions()
        kinds = " and ".join(f"{name}s" for op, name in OPERATORS.items() if op in self.operators)
        where = "" if ctx.device.type == "cuda" else "; without a GPU this checks function and gains no speed"
        choice = "" if times is None else f", where that was measured to gain: {'; '.join(_told(times))}"
        if self.auto and times is None:
            choice = ", all of them, since nothing was measured"
        return model, Change(
            f"{kinds} of tp({ctx.dims.tp}) will be fused with matrix products when the blocks are compiled{choice}"
            f"{where}",
            list(ctx.facts.blocks),
        )

    def _times(self, model: nn.Module, ctx: Context) -> dict[CollectivePlace, PlaceTimes] | None:
        """Times of each place of the blocks; None where they cannot be taken: no GPU, ranks that do not exist."""
        if not self.measures(ctx):
            return None
        tokens = ctx.local_batch * ctx.seq_len // ctx.dims.cp
        cache = Path(self.cache_dir).expanduser().absolute() / "async_tp.json" if self.cache_dir else None
        return async_tp_times.measure(
            [
                place
                for float8 in (False, True)
                for place in block_places(tokens, ctx.facts.dim, *_features(model, ctx, float8=float8), float8=float8)
            ],
            TensorGroup.of(ctx.mesh["tp"]),
            batch=ctx.local_batch,
            dtype=ctx.compute_dtype,
            device=ctx.device,
            cache=cache,
            clock=self.clock,
        )

    def measures(self, ctx: Context) -> bool:
        """Whether these ranks can be timed."""
        return self.clock is not None or (ctx.device.type == "cuda" and torch.distributed.get_backend() != "fake")

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Count what was fused in the graphs of the first step, and what was not, with the reason.

        Raises:
            PipelineError: nothing of a kind that was asked for was fused.
        """
        from titanyaml.distributed import compat_async_tp

        counts = compat_async_tp.fusions() - self.earlier
        left = [
            f"{number} {OPERATORS[kind]}{'s' * (number > 1)} {side}: {reason}"
            for (side, kind, reason), number in sorted(counts.unfused.items())
        ]
        slower = (
            self.auto and not counts.fused and any(reason == compat_async_tp.SLOWER for *_, reason in counts.unfused)
        )
        if slower:
            ctx.log.warning(
                "compile.async_tp is true and fuses NOTHING: every place was measured slower when fused; "
                "compile.async_tp=false is the same and starts faster"
            )
        problems = [] if slower else self._missing(counts, left)
        if problems:
            raise PipelineError(problems)
        fused = [
            f"{counts.fused['forward', op]} + {counts.fused['backward', op]} {OPERATORS[op]}s" for op in self.operators
        ]
        nothing = "NOTHING was fused, since every place was measured slower so; " if slower else ""
        return Change(
            f"{nothing}fused in the compiled graphs, forward + backward: {', '.join(fused)}"
            f"; left as they are: {'; '.join(left) or 'none'}",
            list(ctx.facts.blocks),
        )

    def _missing(self, counts: Fusions, left: list[str]) -> list[Problem]:
        """A problem for each kind that was asked for by name and fused nowhere; under auto, one if nothing was."""
        absent = [one for one in self.operators if not any(kind == one for _, kind in counts.fused)]
        if self.auto and len(absent) < len(self.operators):
            return []
        problems = []
        for operator in absent:
            causes = [line for line, (_, kind, _) in zip(left, sorted(counts.unfused), strict=True) if kind == operator]
            causes = causes or ["no compiled graph holds one; compile.backend=inductor is the one backend that fuses"]
            others = [] if self.auto else [one for one in self.operators if one != operator]
            ways = [f"compile.async_tp_ops=[{','.join(others)}]"] * bool(others) + ["compile.async_tp=false"]
            problems.append(
                Problem(
                    "compile.async_tp",
                    f"no {OPERATORS[operator]} was fused ({'; '.join(causes)})",
                    hint=" or ".join(ways),
                )
            )
        return problems


def _features(model: nn.Module, ctx: Context, *, float8: bool) -> tuple[set[tuple[int, ...]], set[int]]:
    """On this rank, of the layers that multiply in float8 or those that do not: output features of those that read one
    gathered tensor, and input features of those whose outputs are summed."""
    columns, rows = set(), set()
    for block, layout in zip(ctx.facts.blocks, ctx.facts.layouts, strict=True):
        layers = {name: model.get_submodule(f"{block}.{name}") for name in (*layout.column, *layout.row)}
        chosen = {name for name, layer in layers.items() if (layer.product is not F.linear) == float8}
        shapes = {name: local(layer.weight).shape for name, layer in layers.items()}
        for entry in layout.entries:
            readers = [name for name in layout.column if name.startswith(f"{entry}.")]
            if readers and chosen.issuperset(readers):
                columns.add(tuple(shapes[name][0] for name in readers))
        rows |= {shapes[name][1] for name in chosen.intersection(layout.row)}
    return columns, rows


def _told(times: dict[CollectivePlace, PlaceTimes]) -> list[str]:
    """What was measured and decided, a place each."""
    return [
        f"{place} {time.apart:.3f} ms, fused {time.fused:.3f}: {'fused' if time.wins else 'left'}"
        for place, time in times.items()
    ]
