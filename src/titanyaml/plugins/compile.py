"""torch.compile, in place: ``module.compile()`` changes how a module is called, not what it is called."""

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from titanyaml import loss
from titanyaml.config.rules.compile import check_backend, check_cut_model, check_sharded_model
from titanyaml.config.rules.required_plugins import refuse_missing_async_tp
from titanyaml.config.rules.values import check_values
from titanyaml.config.rules.view import problem
from titanyaml.distributed import compat_compile
from titanyaml.errors import PipelineError, Problem
from titanyaml.optim import adamw_backends
from titanyaml.pipeline.protocol import Change, Context

#: CUDA graphs of a step: the first warms up, the second records, the third replays.
_REPLAYING_STEP = 3


class Compile:
    """Compile each block by itself (equal blocks share one graph), or the whole model.

    Args:
        mode: ``block``, ``model``, ``none``, or ``auto``: block on a GPU, none on a CPU.
        backend: torch.compile backend.
        async_tp, async_tp_ops: keys of the same group for the node ``async_tp``; this node only checks that it is on.
        loss, optimizer: keys of the same group by which the runner builds loss and optimizer; this node only checks
            that they were compiled.
        cuda_graphs: replay each block as a CUDA graph.
        cache_dir: folder in which Inductor keeps compiled kernels for the next run; None: torch's own, under /tmp.
            ``TORCHINDUCTOR_CACHE_DIR`` in the environment goes first.
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
        self.counts_before = compat_compile.CompileCounts()  # of the process, before this model
        self.device = torch.device("cpu")
        self.num_steps, self.step_begins = 0, True

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
        """Mode and backend exist, and one graph of the model is possible (``config/rules/compile.py``)."""
        backends = torch.compiler.list_backends
        checks = [
            check_backend(self.backend, backends(), debugging=backends(exclude_tags=None)),
            check_sharded_model(self.mode, ctx.dims.token_degree),
            check_cut_model(self.mode, ctx.dims.pp),
        ]
        if self.async_tp and "async_tp" not in ctx.active:
            checks.append(refuse_missing_async_tp("compile.async_tp=false", "pipeline=default"))
        return check_values("compile", mode=self.mode) + [refusal for refusal in checks if refusal]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Mark the modules; the graphs are built by the first step."""
        self.counts_before, self.device = compat_compile.compile_counts(), ctx.device
        compat_compile.guard_module_hooks()  # another plugin may hook a single block
        compat_compile.fix_saved_rng_state_order()  # another plugin may have made DTensors of the parameters
        if self.backend == "inductor":
            from titanyaml.distributed import compat_inductor  # seconds to import

            compat_inductor.keep_row_sums_apart()
            compat_inductor.launch_triton_kernels_statically()
        names, eager = self._choose_modules(ctx)
        for name in names:
            module = model if name == "*" else model.get_submodule(name)
            # Graphs are whole and static: a break or an exhausted recompile limit raises where it happens. Falling back
            # to eager would be slow, and nobody would see it.
            explain = functools.partial(_explain, type(module))
            compat_compile.compile_module(module, backend=self.backend, cuda_graphs=self.cuda_graphs, explain=explain)
        if self.cuda_graphs:
            model.register_forward_pre_hook(self._mark_step)
        kind = "parts" if eager else "blocks"
        modules = "the whole model" if names == ["*"] else f"each of {len(names)} {kind}"
        compiled = [modules if names else "", "the loss" if self.loss else "", "the update" if self.optimizer else ""]
        graphs = ", replayed as CUDA graphs from the third step on" if self.cuda_graphs else ""
        summary = f"{' and '.join(filter(None, compiled))} will be compiled by {self.backend} in the first step{graphs}"
        return model, Change(f"{summary}{self._use_cache()}", names or ["*"], eager)

    def _choose_modules(self, ctx: Context) -> tuple[list[str], dict[str, str]]:
        """Names of the modules that are compiled, and the reason by name for those that are not."""
        if not self._compiles_model(ctx):
            return [], {}
        return (["*"], {}) if self.mode == "model" else _split_blocks(ctx)

    def _use_cache(self) -> str:
        """Point Inductor at the folder and describe it. Ranks of one machine share it: Inductor locks its files."""
        if self.backend != "inductor" or self.cache_dir is None:
            return ""
        folder = compat_compile.use_compile_cache(Path(self.cache_dir).expanduser().absolute())
        state = "warm" if folder.is_dir() and any(folder.iterdir()) else "cold"
        return f"; {state} cache {folder}"

    def _mark_step(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Tell the CUDA graphs that what they wrote may be overwritten."""
        # gradients live to the end of a step, over several microbatches; without gradients to the end of a forward
        if self.step_begins or not torch.is_grad_enabled():
            torch.compiler.cudagraph_mark_step_begin()
        if torch.is_grad_enabled():
            self.step_begins = False

    def after_step(self, model: nn.Module) -> None:
        """Once CUDA graphs are to be replayed, check that there are some.

        Raises:
            PipelineError: nothing was recorded, or a graph runs without.
        """
        self.step_begins, self.num_steps = True, self.num_steps + 1
        if not self.cuda_graphs or self.num_steps != _REPLAYING_STEP:
            return
        skipped = (compat_compile.compile_counts() - self.counts_before).skipped
        if skipped or not compat_compile.cuda_graphs_recorded(self.device):
            raise _not_replayed(skipped)

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        """Something was compiled and nothing broke.

        Raises:
            PipelineError: nothing was compiled (switched off by the environment), a graph broke, or Inductor refuses
                to make a CUDA graph.
        """
        # counts are the process's: with a second model in it the graphs of an equal one would be reused, not counted
        counts = compat_compile.compile_counts() - self.counts_before
        graphs_of = {}
        if self.loss:
            graphs_of["compile.loss"] = compat_compile.count_graphs_of(loss.chunk_loss)
        if self.optimizer:
            graphs_of["compile.optimizer"] = compat_compile.count_graphs_of(adamw_backends.update)
        switches = {key: f"{key}=false" for key, graphs in graphs_of.items() if not graphs}
        if not counts.graphs:
            switches = switches or {"compile.mode": "compile.mode=none"}
        if switches:
            raise PipelineError([_not_compiled(key, off) for key, off in switches.items()])
        if counts.breaks:
            raise PipelineError([Problem("compile.mode", f"the graph broke: {reason}") for reason in counts.breaks])
        if self.cuda_graphs and counts.skipped:
            raise _not_replayed(counts.skipped)
        plural = "s" if counts.graphs > 1 else ""
        notes = [f"{counts.graphs} graph{plural} compiled, 0 graph breaks"]
        notes += [f"{graphs} of them for {key}" for key, graphs in graphs_of.items()]
        if self.backend == "inductor":
            notes.append(f"{counts.cached} of {counts.built + counts.cached} parts out of the cache")
        return Change("; ".join(notes), ["*"])


def _split_blocks(ctx: Context) -> tuple[list[str], dict[str, str]]:
    """Names of the modules that are compiled one by one, and the reason by name for those that are not."""
    names, eager = [], {}
    for block, layout in zip(ctx.facts.blocks, ctx.facts.layouts, strict=True):
        if layout.experts and ctx.dims.ep > 1:
            # How many rows arrive is known at run time only: a compiled graph would need symbolic sizes, through the
            # hooks of FSDP, which gathers the experts by themselves. What lies around them is compiled.
            names += [f"{block}.{entry}" for entry in layout.entries]
            eager[f"{block}.{layout.experts}"] = "its rows come from other ranks, as many as are sent"
        else:
            names.append(block)
    return names, eager


def _not_compiled(key: str, off: str) -> Problem:
    message = "asked for, but nothing was compiled in the first step"
    return problem(key, message, "", f"unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or {off}")


def _not_replayed(skipped: int) -> PipelineError:
    reason = f"Inductor refuses {skipped} of the graphs" if skipped else "nothing was recorded in the first steps"
    hint = "compile.cuda_graphs=false, or TORCH_LOGS=perf_hints, which names the reason"
    return PipelineError(f"asked for, but {reason}", key="compile.cuda_graphs", hint=hint)


def _explain(kind: type[nn.Module], error: Exception) -> NoReturn:
    name = f"{kind.__name__}.forward"
    if isinstance(error, compat_compile.GraphBreak):
        raise PipelineError(
            f"{name} is to be one graph, which breaks at {error.location}: {error.reason}",
            key="compile.mode",
            hint="write that line so that Dynamo can trace it (TORCH_LOGS=graph_breaks shows the stack), or "
            "compile.mode=none",
        )
    assert isinstance(error, compat_compile.TooManyInputs), "compile_module explains these two"
    source = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind.forward)[1]}"
    raise PipelineError(
        f"{name} ({source}) was to be compiled for more than {error.limit} different inputs, of which the warning "
        "above names the last difference",
        key="compile.mode",
        hint="find what changes from step to step (shapes, dtypes, hooks), or compile.mode=none",
    )
