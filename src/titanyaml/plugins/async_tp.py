"""Async tensor parallelism: a transfer of the tp group and the matrix product next to it run piece by piece, together.

While one slice of the sequence is multiplied the next one travels, over symmetric memory, without occupying the
compute units that a collective kernel takes (Wang et al. 2023, "Overlap communication with dependent computation via
decomposition"). Inductor puts the fused operators into the compiled graphs; this plugin tells it to, counts what came
of it and says what was left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from titanyaml.errors import PipelineError, Problem
from titanyaml.pipeline.protocol import Change, Context

OPERATORS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


class AsyncTensorParallel:
    """Fuse the tp group's collectives with matrix products when the model is compiled.

    Args:
        enabled: whether to.
        operators: kinds of collectives that are fused: all_gather (before a product), reduce_scatter (behind one).
    """

    stage = "async_tp"
    requires = ("tp", "compile")

    def __init__(self, *, enabled: bool = True, operators: Sequence[str] = tuple(OPERATORS)) -> None:
        self.enabled, self.operators = enabled, tuple(operators)

    def reason_off(self, ctx: Context) -> str:
        """Off where it was not asked for."""
        return "" if self.enabled else "compile.async_tp is false"

    def check(self, ctx: Context) -> list[Problem]:
        """There is something to fuse."""
        if self.operators and set(self.operators) <= set(OPERATORS):
            return []
        return [Problem("compile.async_tp_ops", f"is {list(self.operators)}", allowed=f"some of {', '.join(OPERATORS)}",
                        hint=f"compile.async_tp_ops=[{','.join(OPERATORS)}]")]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Set Inductor's hook. The graphs are built by the first step.

        Raises:
            PipelineError: the hook is in use, or this release of torch lacks something.
        """
        assert ctx.mesh is not None, "more than one rank and no mesh"
        try:
            from titanyaml.dist import compat_async_tp  # Inductor takes seconds to import

            compat_async_tp.fuse_collectives(
                ctx.mesh["tp"].get_group().group_name, self.operators, device_type=ctx.device.type
            )
        except (ImportError, RuntimeError) as error:
            raise PipelineError(str(error), key="compile.async_tp", hint="compile.async_tp=false") from error
        self.earlier = compat_async_tp.fusions()
        kinds = " and ".join(f"{name}s" for op, name in OPERATORS.items() if op in self.operators)
        where = "" if ctx.device.type == "cuda" else "; without a GPU this checks function and gains no speed"
        return model, Change(
            f"{kinds} of tp({ctx.dims.tp}) will be fused with matrix products when the blocks are compiled{where}",
            list(ctx.facts.blocks),
        )

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Count what was fused in the graphs of the first step, and what was not, with the reason.

        Raises:
            PipelineError: nothing of a kind that was asked for was fused.
        """
        from titanyaml.dist import compat_async_tp

        counts = compat_async_tp.fusions() - self.earlier
        left = [f"{number} {OPERATORS[kind]}{'s' * (number > 1)} {side}: {reason}"
                for (side, kind, reason), number in sorted(counts.left.items())]
        problems = []
        for operator in self.operators:
            if any(kind == operator for _, kind in counts.fused):
                continue
            causes = [line for line, (_, kind, _) in zip(left, sorted(counts.left), strict=True) if kind == operator]
            causes = causes or ["no compiled graph holds one; compile.backend=inductor is the one backend that fuses"]
            others = [one for one in self.operators if one != operator]
            ways = [f"compile.async_tp_ops=[{','.join(others)}]"] * bool(others) + ["compile.async_tp=false"]
            problems.append(Problem("compile.async_tp", f"no {OPERATORS[operator]} was fused ({'; '.join(causes)})",
                                    hint=" or ".join(ways)))
        if problems:
            raise PipelineError(problems)
        fused = [f"{counts.fused['forward', op]} + {counts.fused['backward', op]} {OPERATORS[op]}s"
                 for op in self.operators]
        return Change(f"fused in the compiled graphs, forward + backward: {', '.join(fused)}"
                      f"; left as they are: {'; '.join(left) or 'none'}", list(ctx.facts.blocks))
