"""torch.compile, in place: ``module.compile()`` changes how a module is called, not what it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from titanyaml.dist import compat
from titanyaml.errors import PipelineError, Problem
from titanyaml.pipeline.protocol import Change, Context

MODES = ("auto", "none", "block", "model")


class Compile:
    """Compile each block by itself (equal blocks share one graph), or the whole model.

    Graphs are whole and static: a break or an exhausted recompile limit raises where it happens instead of falling
    back to eager, which nobody would see.

    Args:
        mode: ``block``, ``model``, ``none``, or ``auto``: block on a GPU, none on a CPU.
        backend: torch.compile backend.
        async_tp, async_tp_ops: keys of the same group that the node ``async_tp`` acts on; here it is only seen to that
            this node is on when they ask for it.
        cache_dir: folder in which inductor keeps compiled kernels for the next run; None: torch's own, under /tmp. A
            folder that ``TORCHINDUCTOR_CACHE_DIR`` names already goes first.
    """

    stage = "compile"

    def __init__(
        self, *, mode: str = "auto", backend: str = "inductor", async_tp: bool = False,
        async_tp_ops: Sequence[str] = (), cache_dir: str | None = None,
    ) -> None:
        self.mode, self.backend, self.async_tp, self.cache_dir = mode, backend, async_tp, cache_dir
        self.earlier = compat.CompileCounts()

    def reason_off(self, ctx: Context) -> str:
        """Off where the mode is none, and under auto without a GPU."""
        if self.mode == "none":
            return "compile.mode is none"
        if self.mode == "auto" and ctx.device.type != "cuda":
            return f"compile.mode is auto, which compiles on a GPU only; the device is {ctx.device.type}"
        return ""

    def check(self, ctx: Context) -> list[Problem]:
        """Mode and backend exist; the whole model is one graph only where FSDP's hooks do not cut it."""
        problems = []
        if self.mode not in MODES:
            problems.append(Problem("compile.mode", f"is {self.mode!r}", allowed=", ".join(MODES)))
        if self.backend not in (known := torch.compiler.list_backends(exclude_tags=None)):
            problems.append(Problem("compile.backend", f"is {self.backend!r}", allowed=", ".join(known)))
        if self.mode == "model" and ctx.dims.token_degree > 1:
            problems.append(Problem(
                "compile.mode", f"is 'model' on {ctx.dims.token_degree} data ranks; gathering weights breaks the graph",
                allowed="block, none", hint="compile.mode=block",
            ))
        if self.async_tp and "async_tp" not in ctx.active:
            problems.append(Problem(
                "compile.async_tp", "is true, but the node that does it is not on: pipeline.plugins.async_tp",
                hint="compile.async_tp=false, or pipeline=default",
            ))
        if self.mode == "model" and ctx.dims.pp > 1:
            problems.append(Problem("compile.mode", "is 'model', but the model is cut into stages",
                                    allowed="block, none", hint="compile.mode=block"))
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Mark the modules; the graphs are built by the first step."""
        self.earlier = compat.compile_counts()
        compat.guard_module_hooks()  # another plugin may hook a single block
        compat.mend_saved_rng_states()  # another plugin may have made DTensors of the parameters
        names, eager = (["*"], {}) if self.mode == "model" else _parts(ctx)
        for name in names:
            module = model if name == "*" else model.get_submodule(name)
            compat.compile_whole(module, backend=self.backend, on_limit=functools.partial(_limit_reached, module))
        what = "the whole model" if self.mode == "model" else f"each of {len(names)} {'parts' if eager else 'blocks'}"
        return model, Change(
            f"{what} will be compiled by {self.backend} in the first step{self._keep_cache()}", names, eager
        )

    def _keep_cache(self) -> str:
        """Point inductor at the folder; what to say of it. Ranks of one machine share it: inductor locks its files."""
        if self.backend != "inductor" or self.cache_dir is None:
            return ""
        folder = compat.keep_compiled_in(Path(self.cache_dir).expanduser().absolute())
        state = "warm" if folder.is_dir() and any(folder.iterdir()) else "cold"
        return f"; {state} cache {folder}"

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Something was compiled and nothing broke. One model a process: the graphs of an equal one would be reused.

        Raises:
            PipelineError: nothing was compiled (switched off by the environment), or a graph broke.
        """
        counts = compat.compile_counts() - self.earlier
        if not counts.graphs:
            raise PipelineError(
                "asked for, but nothing was compiled in the first step", key="compile.mode",
                hint="unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or compile.mode=none",
            )
        if counts.breaks:
            raise PipelineError([Problem("compile.mode", f"the graph broke: {why}") for why in counts.breaks])
        return Change(f"{counts.graphs} graph{'s' * (counts.graphs > 1)} compiled, 0 graph breaks", ["*"])


def _parts(ctx: Context) -> tuple[list[str], dict[str, str]]:
    """What is compiled one by one, and what is not, with the reason.

    Blocks; of a mixture whose tokens travel, what lies around it: how many rows arrive is known at run time only, and
    FSDP gathers the experts by themselves.
    """
    names, eager = [], {}
    for block, layout in zip(ctx.facts.blocks, ctx.facts.layouts, strict=True):
        travels = layout.experts and ctx.dims.ep > 1
        names += [f"{block}.{entry}" for entry in layout.entries] if travels else [block]
        if travels:
            eager[f"{block}.{layout.experts}"] = "its rows come from other ranks, as many as are sent"
    return names, eager


def _limit_reached(module: nn.Module, limit: int) -> NoReturn:
    kind = type(module)
    where = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind.forward)[1]}"
    raise PipelineError(
        f"{kind.__name__}.forward ({where}) was to be compiled for more than {limit} different inputs, of which the "
        "warning above names the last difference", key="compile.mode",
        hint="find what changes from step to step (shapes, dtypes, hooks), or compile.mode=none",
    )
