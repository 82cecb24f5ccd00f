"""Private API of torch.compile: what it did, what it refused, where it keeps it, CUDA graphs.

A part of ``compat.py``; checked with the same releases. Dynamo and Inductor take seconds to import, and are so only
where something is compiled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NoReturn

import torch
from torch import nn

#: Where inductor keeps what it builds.
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class CompileCounts:
    """What torch.compile has done in this process.

    Args:
        graphs: that Dynamo captured. breaks: why a graph broke, and how often. built, cached: graphs of Inductor (a
            forward and a backward count as two) that were compiled, and that came out of its cache on disk.
            skipped: graphs that were to be replayed as CUDA graphs and are not.
    """

    graphs: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    built: int = 0
    cached: int = 0
    skipped: int = 0

    def __sub__(self, earlier: CompileCounts) -> CompileCounts:
        return CompileCounts(
            self.graphs - earlier.graphs,
            self.breaks - earlier.breaks,
            self.built - earlier.built,
            self.cached - earlier.cached,
            self.skipped - earlier.skipped,
        )


def compile_counts() -> CompileCounts:
    """The counts up to now; the difference of two is what happened between them."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    built = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return CompileCounts(
        counters["stats"]["unique_graphs"],
        Counter(counters["graph_break"]),
        built,
        inductor["fxgraph_cache_hit"],
        inductor["cudagraph_skips"],
    )


def count_graphs_of(function: Callable[..., Any]) -> int:
    """Graphs that torch.compile has made of a Python function and that still stand."""
    from torch._dynamo import eval_frame

    return len(eval_frame._debug_get_cache_entry_list(function.__code__))


def guard_module_hooks() -> None:
    """Make torch.compile look at the hooks of a module before it reuses a graph.

    By default it does not, and a block that carries a hook is silently run by the graph of one that does not.
    """
    import torch._dynamo.config as config

    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False


def use_compile_cache(folder: Path) -> Path:
    """Have inductor keep what it builds in ``folder``, unless ``TORCHINDUCTOR_CACHE_DIR`` names another one.

    Inductor writes its own default into that variable when it is imported, so that being set says nothing.

    Returns:
        The folder in force.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        os.environ[CACHE_VARIABLE] = str(folder)
    return Path(os.environ[CACHE_VARIABLE])


class GraphBreak(Exception):
    """Dynamo cannot trace this line into the graph."""

    def __init__(self, reason: str, where: str) -> None:
        super().__init__(reason)
        self.reason, self.where = reason, where


class TooManyInputs(Exception):
    """Different inputs have used up the recompile limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


def compile_module(
    module: nn.Module, *, backend: str, cuda_graphs: bool, explain: Callable[[Exception], NoReturn]
) -> None:
    """``module.compile`` into one static graph.

    Args:
        cuda_graphs: replay it as a CUDA graph (Inductor).
        explain: called with GraphBreak or TooManyInputs instead of what torch raises, which names neither the module
            nor, in one line, the code.
    """
    options = {"triton.cudagraphs": True} if cuda_graphs else None
    module.compile(backend=backend, fullgraph=True, dynamic=False, options=options)
    module._compiled_call_impl = _explained(module._compiled_call_impl, explain)


def compile_function(
    function: Callable[..., Any], *, backend: str, dynamic: bool, explain: Callable[[Exception], NoReturn]
) -> Callable[..., Any]:
    """The same for a function. dynamic: one graph for all sizes."""
    return _explained(torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), explain)


def _explained(compiled: Callable[..., Any], explain: Callable[[Exception], NoReturn]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config, exc

        try:
            return compiled(*args, **kwargs)
        except exc.FailOnRecompileLimitHit:
            told: Exception = TooManyInputs(config.recompile_limit)
        except exc.Unsupported as error:
            told = GraphBreak(_in_one_line(str(error)), _line_of(error))
        explain(told)

    return call


def _in_one_line(text: str) -> str:
    """Dynamo's reason and its explanation, of a text that goes on with hints and a stack."""
    lines = [line.strip() for line in text.splitlines()]
    explained = next((line for line in lines if line.startswith("Explanation: ")), "")
    return ": ".join(part for part in (lines[0].rstrip(":. "), explained.removeprefix("Explanation: ")) if part)


def _line_of(error: Exception) -> str:
    """``file:line (function)`` of the innermost frame that is not torch's own."""
    frames: list[FrameSummary] = list(getattr(error, "real_stack", None) or [])
    outside = [frame for frame in frames if not frame.filename.startswith(_TORCH)] or frames
    return f"{outside[-1].filename}:{outside[-1].lineno} ({outside[-1].name})" if outside else "an unknown line"


def cuda_graphs_recorded(device: torch.device) -> int:
    """CUDA graphs that Inductor's trees of this device hold."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(device.index or 0, create_if_none_exists=False)
    if manager is None:
        return 0
    count, level = 0, [node for nodes in (manager.roots or {}).values() for node in nodes]
    while level:
        count += len(level)
        level = [child for node in level for nodes in node.children.values() for child in nodes]
    return count


def set_activation_memory_budget(share: float) -> None:
    """Let graphs compiled from now on keep this share of the activations that they would keep without recomputation.

    torch has no public name for it. A process-wide setting: one model a process.

    The partitioner measures the inputs of a graph too. From torch 2.13 on process groups are among them, as objects of
    which it refuses to guess a size. They hold no activations: 0 bytes.
    """
    import torch._functorch.config as config

    config.activation_memory_budget = share
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = True


def activation_memory_budget() -> float:
    """The share in force; 1: no budget."""
    import torch._functorch.config as config

    return config.activation_memory_budget


def recomputes_autograd_functions() -> bool:
    """Whether recomputation without ``context_fn`` reaches what a ``torch.autograd.Function`` computes in a compiled
    block. In torch 2.11 it does not: the operators inside carry no mark of the block, and what they put out is kept.
    Later releases give the block a policy of their own, which marks every operator; so does any ``context_fn``.
    """
    from torch._higher_order_ops import wrap

    return hasattr(wrap, "_always_prefer_recompute")


def fix_saved_rng_state_order() -> None:
    """Let a compiled block with recomputation have DTensor parameters (torch 2.13).

    What a compiled forward keeps for its backward is listed as tensors, then other objects, then symbols, and sliced
    by their counts. The states of recomputed random operators (fused attention counts as one) are put before the
    symbols, but behind the objects, of which a DTensor's mesh is one: a mesh is then taken for a tensor and refused.
    """
    from torch._functorch import partitioners

    original = getattr(partitioners, "functionalize_rng_ops", None)
    if original is None or not hasattr(partitioners, "is_opaque_node") or hasattr(original, "mended"):
        return

    def functionalize(joint: Any, forward: Any, backward: Any, num_sym_nodes: int) -> Any:
        [output] = forward.graph.find_nodes(op="output")
        objects = sum(partitioners.is_opaque_node(node) for node in output.args[0])
        forward, backward = original(joint, forward, backward, num_sym_nodes + objects)
        inputs = backward.graph.find_nodes(op="placeholder")
        tangent = next(node for node in inputs if node.name.startswith("tangents"))
        for node in inputs[: inputs.index(tangent)]:
            if partitioners.is_opaque_node(node):
                tangent.prepend(node)  # the same order here: states before objects
        backward.recompile()
        return forward, backward

    functionalize.mended = True
    partitioners.functionalize_rng_ops = functionalize
