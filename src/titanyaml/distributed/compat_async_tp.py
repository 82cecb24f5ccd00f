"""Private API of async tensor parallelism: Inductor's hook and fusions, symmetric memory's operators, the counters.

The other home of private torch API beside ``compat.py``; importing it takes about two seconds (Inductor), so that only
what compiles does. Run with torch 2.13; where a release lacks a name, ``fuse_collectives`` says which.

Inductor's own pass (``_inductor.config._micro_pipeline_tp``) fuses all or nothing and returns in silence when the build
has no NCCL, when symmetric memory was not enabled for the group, and when the graph does not look as it expects. Here
its matchers and fusions are called one by one: only for the group and the kinds that were asked for, after the graph
was put into their form (``graph_products``), with the first two questions answered by this file, and every collective
that is left is counted with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes import micro_pipeline_tp as stock
from torch.distributed import _symmetric_memory
from torch.fx import Graph, Node

from titanyaml.distributed import float8_reduce_scatter, graph_matmuls
from titanyaml.distributed.async_tp_times import CollectivePlace

_COLLECTIVES = {
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
}
_NEEDED = (
    (stock, "find_all_gather_patterns"),
    (stock, "find_reduce_scatter_patterns"),
    (stock, "fuse_all_gather_matmul"),
    (stock, "fuse_matmul_reduce_scatter"),
    (_symmetric_memory, "_test_mode"),
    (_symmetric_memory, "_pipelined_produce_and_all2all"),
    (inductor_config, "post_grad_custom_pre_pass"),
)
_PREFIX, _FUSED = "titanyaml async_tp", ""
#: Why a place was left under measured choice.
SLOWER, UNMEASURED = "measured slower when fused", "a shape or a kind of product that was not measured"
_LIBRARIES: list[torch.library.Library] = []  # kernels live as long as their library


@dataclass(frozen=True)
class Fusions:
    """Collectives of one tp group in the graphs that were compiled.

    Args:
        fused: (side, kind) to how many were fused with a matrix product; side is "forward" or "backward".
        left: (side, kind, reason) to how many were not.
    """

    fused: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def __sub__(self, earlier: Fusions) -> Fusions:
        return Fusions(self.fused - earlier.fused, self.left - earlier.left)


def fusions() -> Fusions:
    """The counts up to now. Inductor keeps its counters with a compiled graph and adds them again on a cache hit."""
    found = Fusions()
    for name, count in counters["inductor"].items():
        if name.startswith(_PREFIX):
            _, side, kind, reason = name.split("|")
            if reason == _FUSED:
                found.fused[side, kind] += count
            else:
                found.left[side, kind, reason] += count
    return found


def fuse_collectives(
    group_name: str, kinds: tuple[str, ...], *, device_type: str, wins: dict[CollectivePlace, bool] | None = None
) -> None:
    """From now on Inductor fuses a group's collectives with matrix products.

    Args:
        kinds: of "all_gather" and "reduce_scatter". device_type: "cpu" gets plain kernels of the fused operators.
        wins: what is faster fused, of what was measured; no other place is touched. None: all are fused.

    Raises:
        RuntimeError: the hook is taken by somebody else, or this torch lacks a name.
    """
    if missing := [f"{module.__name__}.{name}" for module, name in _NEEDED if not hasattr(module, name)]:
        raise RuntimeError(f"torch {torch.__version__} has no {', '.join(missing)}")
    taken = inductor_config.post_grad_custom_pre_pass
    if taken is not None and not isinstance(taken, FuseCollectives):
        raise RuntimeError("torch._inductor.config.post_grad_custom_pre_pass is already in use")
    if device_type == "cpu":
        register_cpu_kernels()
    inductor_config.post_grad_custom_pre_pass = FuseCollectives(group_name, kinds, wins)


class FuseCollectives(CustomGraphPass):
    """The pass over one graph. Its identity is part of the key of Inductor's cache."""

    def __init__(self, group_name: str, kinds: tuple[str, ...], wins: dict[CollectivePlace, bool] | None) -> None:
        self.group_name, self.kinds, self.wins = group_name, kinds, wins
        self.refused: dict[Node, str] = {}

    def uuid(self) -> Any:
        wins = None if self.wins is None else sorted(self.wins.items())
        files = (__file__, graph_matmuls.__file__, float8_reduce_scatter.__file__)
        return get_hash_for_files(files, repr((self.group_name, self.kinds, wins)))

    def __call__(self, graph: Graph) -> None:
        collectives = {
            node: kind
            for node in graph.nodes
            if (kind := _COLLECTIVES.get(node.target)) and self.group_name in (*node.args, *node.kwargs.values())
        }
        if not collectives:
            return
        self.refused = {}
        with _eligible(self.group_name):
            matched = self._gathers(graph) | self._scatters(graph, collectives)
        remain = set(graph.nodes)
        side = "backward" if any(node.name.startswith("tangents") for node in graph.nodes) else "forward"
        for node, kind in collectives.items():
            reason = self._reason(node, kind, matched) if node in remain else _FUSED
            counters["inductor"]["|".join((_PREFIX, side, kind, reason))] += 1

    def _gathers(self, graph: Graph) -> set[Node]:
        """Fuse all-gathers; returns those whose surroundings were understood."""
        if "all_gather" not in self.kinds:
            return set()
        matches = [match for match in stock.find_all_gather_patterns(graph) if match.group_name == self.group_name]
        matches = [
            match for match in matches if self._wins(match.ag_node, graph_matmuls.matmuls_after_gather(match.res_node))
        ]
        for match in matches:
            graph_matmuls.split_bias_from_addmm(match.res_node)
            stock.fuse_all_gather_matmul(match)
        return {match.ag_node for match in matches}

    def _scatters(self, graph: Graph, collectives: dict[Node, str]) -> set[Node]:
        """Fuse reduce-scatters; returns those whose surroundings were understood."""
        if "reduce_scatter" not in self.kinds:
            return set()
        ours = set()
        for node, kind in collectives.items():
            if kind != "reduce_scatter" or not self._wins(node, graph_matmuls.matmul_before_scatter(node)):
                continue
            if graph_matmuls.fuse_float8_scatter(node, self.group_name):
                ours.add(node)
            else:
                graph_matmuls.merge_summed_matmuls(node)
        matches = [
            match
            for match in stock.find_reduce_scatter_patterns(graph)
            if match.group_name == self.group_name and match.reduce_scatter_node not in self.refused
        ]
        for match in matches:
            stock.fuse_matmul_reduce_scatter(match)
        return ours | {match.reduce_scatter_node for match in matches}

    def _wins(self, node: Node, sizes: graph_matmuls.Sizes | None) -> bool:
        """Whether a collective is to be fused with products of these sizes; notes why not."""
        if self.wins is None or sizes is None:  # without a product the reason is another
            return True
        won = self.wins.get(CollectivePlace(_COLLECTIVES[node.target], *sizes))
        if not won:
            self.refused[node] = UNMEASURED if won is None else SLOWER
        return bool(won)

    def _reason(self, node: Node, kind: str, matched: set[Node]) -> str:
        """Why a collective is still there."""
        if kind not in self.kinds:
            return "not in compile.async_tp_ops"
        if node in self.refused:
            return self.refused[node]
        if node not in matched:
            return "torch knows no pattern for what surrounds it"
        if kind == "all_gather":
            return "no matrix product takes the gathered tensor as its left side"
        if not graph_matmuls.is_matmul(graph_matmuls.scattered(node)):
            return "what is scattered is no matrix product of this graph, and no sum of such alone"
        return "refused by torch's fusion"


def gather_multiply(x_BSK: Tensor, weights: list[Tensor], group_name: str) -> list[Tensor]:
    """Products of the gathered sequence, dimension 1, with each matrix, by torch's fused operator."""
    return torch.ops.symm_mem.fused_all_gather_matmul(x_BSK, weights, 1, group_name)[1]


def multiply_scatter(x_BSK: Tensor, weight: Tensor, group_name: str) -> Tensor:
    """The product, summed and scattered along dimension 1, by torch's fused operator."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x_BSK, weight, "sum", 1, group_name)


@contextmanager
def _eligible(group_name: str) -> Iterator[None]:
    """Answer the questions of torch's fusions that end them in silence.

    A build without NCCL cannot have a group on GPUs, and on a CPU the operators have kernels of ours; symmetric memory
    enables itself for a group when its first buffer is exchanged, and says so if it cannot.
    """
    original = torch.distributed.is_nccl_available
    torch.distributed.is_nccl_available = lambda: True
    try:
        with _symmetric_memory._test_mode(group_names={group_name}):
            yield
    finally:
        torch.distributed.is_nccl_available = original


@cache
def register_cpu_kernels() -> None:
    """Kernels that gather, then multiply, and multiply, then scatter: for a check of function on gloo ranks."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in (
        "all_gather_matmul",
        "all_gather_scaled_matmul",
        "matmul_reduce_scatter",
        "scaled_matmul_reduce_scatter",
    ):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::fused_{name}", "CPU"):
            library.impl(f"fused_{name}", getattr(_symmetric_memory, f"_fused_{name}_fallback"), "CPU")
    _LIBRARIES.append(library)
