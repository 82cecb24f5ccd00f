"""torch.compile, in place: ``module.compile()`` changes how a module is called, not what it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from titanyaml import loss
from titanyaml.config.rules.compile import unknown_backend
from titanyaml.distributed import compat_compile
from titanyaml.errors import PipelineError, Problem
from titanyaml.optim import compiled_adamw
from titanyaml.pipeline.protocol import Change, Context

MODES = ("auto", "none", "block", "model")
#: The first step warms up, the second records, the third replays.
_RECORDED = 3


class Compile:
    """Compile each block by itself (equal blocks share one graph), or the whole model.

    Graphs are whole and static: a break or an exhausted recompile limit raises where it happens instead of falling
    back to eager, which nobody would see.

    Args:
        mode: ``block``, ``model``, ``none``, or ``auto``: block on a GPU, none on a CPU.
        backend: torch.compile backend.
        async_tp, async_tp_ops: keys of the same group that the node ``async_tp`` acts on; here it is only seen to that
            this node is on when they ask for it.
        loss, optimizer: keys of the same group by which the runner builds loss and optimizer; here it is only seen to
            that they were compiled.
        cuda_graphs: replay each block as a CUDA graph.
        cache_dir: folder in which inductor keeps compiled kernels for the next run; None: torch's own, under /tmp. A
            folder that ``TORCHINDUCTOR_CACHE_DIR`` names already goes first.
    """

    stage = "compile"

    def __init__(
        self,
        *,
        mode: str = "auto",
        backend: str = "inductor",
        async_tp: bool = False,
        async_tp_ops: Sequence[str] = (),
        loss: bool = False,
        optimizer: bool = False,
        cuda_graphs: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        self.mode, self.backend, self.async_tp, self.cache_dir = mode, backend, async_tp, cache_dir
        self.loss, self.optimizer, self.cuda_graphs = loss, optimizer, cuda_graphs
        self.earlier = compat_compile.CompileCounts()
        self.device = torch.device("cpu")
        self.steps, self.step_begins = 0, True

    def reason_off(self, ctx: Context) -> str:
        """Off where the mode is none, and under auto without a GPU unless the loss or the optimizer is compiled."""
        if self.mode == "none":
            return "compile.mode is none"
        if not (self._compiles_model(ctx) or self.loss or self.optimizer):
            return f"compile.mode is auto, which compiles on a GPU only; the device is {ctx.device.type}"
        return ""

    def _compiles_model(self, ctx: Context) -> bool:
        return self.mode != "auto" or ctx.device.type == "cuda"

    def check(self, ctx: Context) -> list[Problem]:
        """Mode and backend exist; the whole model is one graph only where FSDP's hooks do not cut it."""
        problems = []
        if self.mode not in MODES:
            problems.append(Problem("compile.mode", f"is {self.mode!r}", allowed=", ".join(MODES)))
        known = torch.compiler.list_backends
        if unknown := unknown_backend(self.backend, known(), debugging=known(exclude_tags=None)):
            problems.append(unknown)
        if self.mode == "model" and ctx.dims.token_degree > 1:
            problems.append(
                Problem(
                    "compile.mode",
                    f"is 'model' on {ctx.dims.token_degree} data ranks; gathering weights breaks the graph",
                    allowed="block, none",
                    hint="compile.mode=block",
                )
            )
        if self.async_tp and "async_tp" not in ctx.active:
            problems.append(
                Problem(
                    "compile.async_tp",
                    "is true, but the node that does it is not on: pipeline.plugins.async_tp",
                    hint="compile.async_tp=false, or pipeline=default",
                )
            )
        if self.mode == "model" and ctx.dims.pp > 1:
            problems.append(
                Problem(
                    "compile.mode",
                    "is 'model', but the model is cut into stages",
                    allowed="block, none",
                    hint="compile.mode=block",
                )
            )
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Mark the modules; the graphs are built by the first step."""
        self.earlier, self.device = compat_compile.compile_counts(), ctx.device
        compat_compile.guard_module_hooks()  # another plugin may hook a single block
        compat_compile.fix_saved_rng_state_order()  # another plugin may have made DTensors of the parameters
        if self.backend == "inductor":
            from titanyaml.distributed import compat_inductor  # seconds to import

            compat_inductor.keep_row_sums_apart()
            compat_inductor.launch_triton_kernels_statically()
        compiled, names, eager = [], [], {}
        if self._compiles_model(ctx):
            names, eager = (["*"], {}) if self.mode == "model" else _parts(ctx)
            what = f"each of {len(names)} {'parts' if eager else 'blocks'}"
            compiled.append("the whole model" if self.mode == "model" else what)
        for name in names:
            module = model if name == "*" else model.get_submodule(name)
            compat_compile.compile_module(
                module,
                backend=self.backend,
                cuda_graphs=self.cuda_graphs,
                explain=functools.partial(_explain, type(module)),
            )
        if self.cuda_graphs:
            model.register_forward_pre_hook(self._mark_step)
        if self.loss or self.optimizer:
            compiled += [what for what, on in (("the loss", self.loss), ("the update", self.optimizer)) if on]
            names = names or ["*"]
        graphs = ", replayed as CUDA graphs from the third step on" if self.cuda_graphs else ""
        return model, Change(
            f"{' and '.join(compiled)} will be compiled by {self.backend} in the first step{graphs}"
            f"{self._keep_cache()}",
            names,
            eager,
        )

    def _keep_cache(self) -> str:
        """Point inductor at the folder; what to say of it. Ranks of one machine share it: inductor locks its files."""
        if self.backend != "inductor" or self.cache_dir is None:
            return ""
        folder = compat_compile.use_compile_cache(Path(self.cache_dir).expanduser().absolute())
        state = "warm" if folder.is_dir() and any(folder.iterdir()) else "cold"
        return f"; {state} cache {folder}"

    def _mark_step(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Tell the CUDA graphs that what they wrote may be overwritten: gradients live to the end of a step, what
        validation computes to the end of a forward."""
        if self.step_begins or not torch.is_grad_enabled():
            torch.compiler.cudagraph_mark_step_begin()
        if torch.is_grad_enabled():
            self.step_begins = False

    def after_step(self, model: nn.Module) -> None:
        """Once CUDA graphs are to be replayed: there are some.

        Raises:
            PipelineError: nothing was recorded, or a graph runs without.
        """
        self.step_begins, self.steps = True, self.steps + 1
        if not self.cuda_graphs or self.steps != _RECORDED:
            return
        skipped = (compat_compile.compile_counts() - self.earlier).skipped
        if skipped or not compat_compile.cuda_graphs_recorded(self.device):
            raise _not_replayed(skipped)

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Something was compiled and nothing broke. One model a process: the graphs of an equal one would be reused.

        Raises:
            PipelineError: nothing was compiled (switched off by the environment), a graph broke, or Inductor refuses
                to make a CUDA graph.
        """
        counts = compat_compile.compile_counts() - self.earlier
        functions = {
            "compile.loss": self.loss and loss.chunk_loss,
            "compile.optimizer": self.optimizer and compiled_adamw.update,
        }
        made = {key: compat_compile.count_graphs_of(function) for key, function in functions.items() if function}
        idle = [key for key, graphs in made.items() if not graphs]
        if not counts.graphs or idle:
            raise PipelineError(
                [
                    Problem(
                        key,
                        "asked for, but nothing was compiled in the first step",
                        hint=f"unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or {off}",
                    )
                    for key, off in ([(key, f"{key}=false") for key in idle] or [("compile.mode", "compile.mode=none")])
                ]
            )
        if counts.breaks:
            raise PipelineError([Problem("compile.mode", f"the graph broke: {why}") for why in counts.breaks])
        if self.cuda_graphs and counts.skipped:
            raise _not_replayed(counts.skipped)
        found = [f"{counts.graphs} graph{'s' * (counts.graphs > 1)} compiled, 0 graph breaks"]
        found += [f"{graphs} of them for {key}" for key, graphs in made.items()]
        if self.backend == "inductor":
            found.append(f"{counts.cached} of {counts.built + counts.cached} parts out of the cache")
        return Change("; ".join(found), ["*"])


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


def _not_replayed(skipped: int) -> PipelineError:
    what = f"Inductor refuses {skipped} of the graphs" if skipped else "nothing was recorded in the first steps"
    return PipelineError(
        f"asked for, but {what}",
        key="compile.cuda_graphs",
        hint="compile.cuda_graphs=false, or TORCH_LOGS=perf_hints, which names the reason",
    )


def _explain(kind: type[nn.Module], error: Exception) -> NoReturn:
    name = f"{kind.__name__}.forward"
    if isinstance(error, compat_compile.GraphBreak):
        raise PipelineError(
            f"{name} is to be one graph, which breaks at {error.location}: {error.reason}",
            key="compile.mode",
            hint="write that line so that Dynamo can trace it (TORCH_LOGS=graph_breaks shows the stack), or "
            "compile.mode=none",
        )
    where = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind.forward)[1]}"
    raise PipelineError(
        f"{name} ({where}) was to be compiled for more than {error.limit} different inputs, of which the warning above "
        "names the last difference",
        key="compile.mode",
        hint="find what changes from step to step (shapes, dtypes, hooks), or compile.mode=none",
    )
