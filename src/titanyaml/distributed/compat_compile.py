"""Private API of torch.compile: counters, errors, the cache folder, CUDA graphs and recomputation in compiled graphs.

Dynamo and Inductor take seconds to import, so each function imports what it needs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NoReturn

import torch
from torch import nn

from titanyaml.distributed import compat

#: First and last release that this file was run with: 2.11 on GPUs, 2.13 on CPUs.
TRIED_TORCH = ("2.11", "2.13")

#: Folder in which Inductor keeps what it builds.
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TORCH_FOLDER = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class CompileCounts:
    """What torch.compile has done in this process; to Inductor a forward and a backward are two graphs."""

    graphs: int = 0  # that Dynamo captured
    breaks: Counter[str] = field(default_factory=Counter)  # why a graph broke, and how often
    built: int = 0  # graphs that Inductor compiled
    cached: int = 0  # graphs out of Inductor's cache on disk
    skipped: int = 0  # graphs that could not be replayed as CUDA graphs

    def __sub__(self, earlier: CompileCounts) -> CompileCounts:
        return CompileCounts(*(getattr(self, part.name) - getattr(earlier, part.name) for part in fields(self)))


def compile_counts() -> CompileCounts:
    """The counts up to now; the difference of two is what happened between them."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return CompileCounts(
        graphs=counters["stats"]["unique_graphs"],
        breaks=Counter(counters["graph_break"]),
        built=inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        cached=inductor["fxgraph_cache_hit"],
        skipped=inductor["cudagraph_skips"],
    )


def count_graphs_of(function: Callable[..., Any]) -> int:
    """Graphs that torch.compile has made of a Python function and that are still valid."""
    from torch._dynamo import eval_frame

    return len(eval_frame._debug_get_cache_entry_list(function.__code__))


def guard_module_hooks() -> None:
    """Make torch.compile check the hooks of a module before it reuses a graph."""
    # by default a block with a hook silently runs the graph of a block without one
    import torch._dynamo.config as config

    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False


def use_compile_cache(folder: Path) -> Path:
    """Have Inductor keep what it builds in ``folder``, unless ``TORCHINDUCTOR_CACHE_DIR`` is set; returns which."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Inductor writes its default into the variable when it is imported, so that being set says nothing
    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        os.environ[CACHE_VARIABLE] = str(folder)
    return Path(os.environ[CACHE_VARIABLE])


@dataclass
class GraphBreak(Exception):
    """Dynamo cannot trace the line at ``location`` into the graph."""

    reason: str
    location: str


@dataclass
class TooManyInputs(Exception):
    """Different inputs have used up the recompile limit."""

    limit: int


#: Raises an error of ours for a GraphBreak or TooManyInputs: torch's names neither the module nor, briefly, the code.
Explain = Callable[[Exception], NoReturn]


def compile_module(module: nn.Module, *, backend: str, cuda_graphs: bool, explain: Explain) -> None:
    """``module.compile`` into one static graph; ``cuda_graphs``: replayed as a CUDA graph (Inductor)."""
    options: dict[str, Any] | None = {"triton.cudagraphs": True} if cuda_graphs else None
    module.compile(backend=backend, fullgraph=True, dynamic=False, options=options)
    compiled = module._compiled_call_impl
    assert compiled is not None, "module.compile sets the call"
    compat.warn_if_untried("compile.mode", TRIED_TORCH)
    # monkeypatch: _compiled_call_impl of this module, to translate errors. May go when torch lets a caller handle them.
    module._compiled_call_impl = _translate_errors(compiled, explain)


def compile_function(
    function: Callable[..., Any], *, backend: str, dynamic: bool, explain: Explain
) -> Callable[..., Any]:
    """``torch.compile`` of a function into one graph; ``dynamic``: one graph for all sizes."""
    return _translate_errors(torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), explain)


def _translate_errors(compiled: Callable[..., Any], explain: Explain) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config, exc

        try:
            return compiled(*args, **kwargs)
        except exc.FailOnRecompileLimitHit:
            error: Exception = TooManyInputs(config.recompile_limit)
        except exc.Unsupported as unsupported:
            error = GraphBreak(_shorten(str(unsupported)), _location_of(unsupported))
        explain(error)  # outside of the handlers, so that torch's long report is not chained to ours

    return call


def _shorten(text: str) -> str:
    """Dynamo's reason and explanation in one line, without the hints and the stack behind them."""
    lines = [line.strip() for line in text.splitlines()]
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    return ": ".join(part for part in (lines[0].rstrip(":. "), explanation.removeprefix("Explanation: ")) if part)


def _location_of(error: Exception) -> str:
    """``file:line (function)`` of the innermost frame that is not torch's own."""
    frames: list[FrameSummary] = list(getattr(error, "real_stack", None) or [])
    outside_torch = [frame for frame in frames if not frame.filename.startswith(_TORCH_FOLDER)] or frames
    labels = [f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in outside_torch]
    return labels[-1] if labels else "an unknown line"


def cuda_graphs_recorded(device: torch.device) -> int:
    """CUDA graphs in Inductor's trees of this device."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(device.index or 0, create_if_none_exists=False)
    if manager is None:
        return 0
    count, level = 0, [node for nodes in (manager.roots or {}).values() for node in nodes]
    while level:
        count += len(level)
        level = [child for node in level for children in node.children.values() for child in children]
    return count


def set_activation_memory_budget(share: float) -> None:
    """Let graphs compiled from now on keep this share of the activations that they keep without recomputation."""
    import torch._functorch.config as config

    config.activation_memory_budget = share  # of the process: one model a process
    # The partitioner measures a graph's inputs too. From 2.13 on process groups are among them, as objects of which it
    # refuses to guess a size. They hold no activations.
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = True


def activation_memory_budget() -> float:
    """The share in force; 1: no budget."""
    import torch._functorch.config as config

    return config.activation_memory_budget


def recomputes_autograd_functions() -> bool:
    """Whether a compiled block without ``context_fn`` recomputes what autograd Functions in it computed."""
    # In torch 2.11 it does not: operators inside the function carry no mark of the block and their outputs are kept
    # (805 MB of a 3B block with own float8 matmuls and 16,384 tokens). Later releases give the block a policy that
    # marks every operator; so does any context_fn.
    from torch._higher_order_ops import wrap

    return hasattr(wrap, "_always_prefer_recompute")


def fix_saved_rng_state_order() -> None:
    """Let a compiled block with recomputation have DTensor parameters (torch 2.13)."""
    # A compiled forward lists what it keeps for the backward as tensors, other objects, symbols, and slices the list by
    # their counts. The states of recomputed random operators (fused attention is one) are put before the symbols but
    # behind the objects. One object is a DTensor's mesh, which is then taken for a tensor and refused.
    from torch._functorch import partitioners

    original = getattr(partitioners, "functionalize_rng_ops", None)
    is_opaque: Any = getattr(partitioners, "is_opaque_node", None)
    if original is None or is_opaque is None or hasattr(original, "is_titanyaml"):
        return
    compat.warn_if_untried("a compiled block with recomputation and DTensor parameters", TRIED_TORCH)

    def functionalize(joint: Any, forward: Any, backward: Any, num_sym_nodes: int) -> Any:
        [output] = forward.graph.find_nodes(op="output")
        num_objects = sum(is_opaque(node) for node in output.args[0])
        # counted among the symbols, the objects are skipped too, and the states land before both
        forward, backward = original(joint, forward, backward, num_sym_nodes + num_objects)
        inputs = backward.graph.find_nodes(op="placeholder")
        tangent = next(node for node in inputs if node.name.startswith("tangents"))
        for node in inputs[: inputs.index(tangent)]:
            if is_opaque(node):
                tangent.prepend(node)  # the backward takes them in the same order: states before objects
        backward.recompile()
        return forward, backward

    functionalize.__dict__["is_titanyaml"] = True  # so that a second call does not wrap the wrapper
    # monkeypatch: torch._functorch.partitioners.functionalize_rng_ops. May go when torch counts opaque objects there.
    partitioners.functionalize_rng_ops = functionalize  # type: ignore[assignment] # torch names the parameters
