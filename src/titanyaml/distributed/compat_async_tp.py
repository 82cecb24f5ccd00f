"""Private API of async tensor parallelism: Inductor's hook, its fusions and counters, symmetric memory's operators.

Inductor's own pass (``_inductor.config._micro_pipeline_tp``) fuses all or nothing. It returns in silence when the build
has no NCCL, when symmetric memory was not enabled for the group, and when the graph does not look as it expects.
So its matchers and fusions are called one by one here: only for the requested group and kinds, after the graph was
rewritten into their form (``graph_matmuls``). Every collective that is left is counted with the reason.

Importing this file takes about two seconds (Inductor), so that only what compiles does.
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
from torch._inductor.fx_passes import micro_pipeline_tp as inductor_pass
from torch.distributed import _symmetric_memory
from torch.fx import Graph, Node

from titanyaml.distributed import compat, float8_reduce_scatter, graph_matmuls
from titanyaml.distributed.graph_matmuls import CollectivePlace

#: Fused graphs ran on GPUs with 2.11 and on CPU ranks with 2.13.
TRIED_TORCH = ("2.11", "2.13")

_KINDS: dict[Any, str] = {compat.ALL_GATHER: "all_gather", compat.REDUCE_SCATTER: "reduce_scatter"}
_PATTERNS = ("find_all_gather_patterns", "find_reduce_scatter_patterns")
_REQUIRED_NAMES: dict[Any, tuple[str, ...]] = {
    inductor_pass: (*_PATTERNS, "fuse_all_gather_matmul", "fuse_matmul_reduce_scatter"),
    _symmetric_memory: ("_test_mode", "_pipelined_produce_and_all2all"),
    inductor_config: ("post_grad_custom_pre_pass",),
}
_COUNTER_PREFIX, _FUSED = "titanyaml async_tp", ""
#: Why a place was not fused although its times were measured, or should have been.
SLOWER, UNMEASURED = "measured slower when fused", "a shape or a kind of product that was not measured"
_LIBRARIES: list[torch.library.Library] = []  # a kernel is unregistered when its library is collected


@dataclass(frozen=True)
class Fusions:
    """Collectives of one tp group in the graphs that were compiled; side is "forward" or "backward"."""

    fused: Counter[tuple[str, str]] = field(default_factory=Counter)  # (side, kind) of those fused with a matmul
    unfused: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (side, kind, reason) of the others

    def __sub__(self, earlier: Fusions) -> Fusions:
        return Fusions(self.fused - earlier.fused, self.unfused - earlier.unfused)


def fusions() -> Fusions:
    """The counts up to now."""
    # Inductor stores its counters with a compiled graph and adds them again on a cache hit. So the counts in them are
    # right too where the graph comes out of the cache and no pass runs.
    totals = Fusions()
    for name, count in counters["inductor"].items():
        if name.startswith(_COUNTER_PREFIX):
            _, side, kind, reason = name.split("|")
            if reason == _FUSED:
                totals.fused[side, kind] += count
            else:
                totals.unfused[side, kind, reason] += count
    return totals


def fuse_collectives(
    group_name: str, kinds: tuple[str, ...], *, device_type: str, wins: dict[CollectivePlace, bool] | None = None
) -> None:
    """From now on Inductor fuses a group's collectives (``kinds``: "all_gather", "reduce_scatter") with matmuls.
    ``device_type`` "cpu" registers plain kernels. ``wins``: whether a measured place is faster fused; None: fuse all.
    """
    required = ((module, name) for module, names in _REQUIRED_NAMES.items() for name in names)
    if missing := [f"{module.__name__}.{name}" for module, name in required if not hasattr(module, name)]:
        raise RuntimeError(f"torch {torch.__version__} has no {', '.join(missing)}")
    current = inductor_config.post_grad_custom_pre_pass
    if current is not None and not isinstance(current, FuseCollectives):
        raise RuntimeError("torch._inductor.config.post_grad_custom_pre_pass is already in use")
    compat.warn_if_untried("compile.async_tp", TRIED_TORCH)
    if device_type == "cpu":
        register_cpu_kernels()
    inductor_config.post_grad_custom_pre_pass = FuseCollectives(group_name, kinds, wins)


class FuseCollectives(CustomGraphPass):
    """The pass over one graph."""

    def __init__(self, group_name: str, kinds: tuple[str, ...], wins: dict[CollectivePlace, bool] | None) -> None:
        self.group_name, self.kinds, self.wins = group_name, kinds, wins
        self.refusals: dict[Node, str] = {}

    def uuid(self) -> Any:
        """Part of the key of Inductor's cache: graphs change with this code and with the decisions."""
        wins = None if self.wins is None else sorted(self.wins.items())
        modules = (float8_reduce_scatter, graph_matmuls)
        files = (__file__, *(str(module.__file__) for module in modules))
        return get_hash_for_files(files, repr((self.group_name, self.kinds, wins)))

    def __call__(self, graph: Graph) -> None:
        collectives = {
            node: kind
            for node in graph.nodes
            if (kind := _KINDS.get(node.target)) and self.group_name in (*node.args, *node.kwargs.values())
        }
        if not collectives:
            return
        self.refusals = {}
        with _eligible(self.group_name):
            matched = self._fuse_gathers(graph) | self._fuse_scatters(graph, collectives)
        remaining = set(graph.nodes)
        side = "backward" if any(node.name.startswith("tangents") for node in graph.nodes) else "forward"
        for node, kind in collectives.items():
            reason = self._reason(node, kind, matched) if node in remaining else _FUSED
            counters["inductor"]["|".join((_COUNTER_PREFIX, side, kind, reason))] += 1

    def _fuse_gathers(self, graph: Graph) -> set[Node]:
        """Fuse all-gathers; returns those whose surroundings matched a pattern."""
        if "all_gather" not in self.kinds:
            return set()
        matches = [
            match
            for match in inductor_pass.find_all_gather_patterns(graph)
            if match.group_name == self.group_name
            and self._wins(match.ag_node, graph_matmuls.matmuls_after_gather(match.res_node))
        ]
        for match in matches:
            graph_matmuls.split_bias_from_addmm(match.res_node)
            inductor_pass.fuse_all_gather_matmul(match)
        return {match.ag_node for match in matches}

    def _fuse_scatters(self, graph: Graph, collectives: dict[Node, str]) -> set[Node]:
        if "reduce_scatter" not in self.kinds:
            return set()
        fused_float8 = set()
        for node, kind in collectives.items():
            if kind != "reduce_scatter" or not self._wins(node, graph_matmuls.matmul_before_scatter(node)):
                continue
            if graph_matmuls.fuse_float8_scatter(node, self.group_name):
                fused_float8.add(node)
            else:
                graph_matmuls.merge_summed_matmuls(node)
        matches = [
            match
            for match in inductor_pass.find_reduce_scatter_patterns(graph)
            if match.group_name == self.group_name and match.reduce_scatter_node not in self.refusals
        ]
        for match in matches:
            inductor_pass.fuse_matmul_reduce_scatter(match)
        return fused_float8 | {match.reduce_scatter_node for match in matches}

    def _wins(self, node: Node, place: CollectivePlace | None) -> bool:
        """Whether a collective at this place is to be fused; notes why not. Without a matmul the reason is another."""
        if self.wins is None or place is None:
            return True
        wins = self.wins.get(place)
        if not wins:
            self.refusals[node] = UNMEASURED if wins is None else SLOWER
        return bool(wins)

    def _reason(self, node: Node, kind: str, matched: set[Node]) -> str:
        if kind not in self.kinds:
            return "not in compile.async_tp_ops"
        if node in self.refusals:
            return self.refusals[node]
        if node not in matched:
            return "torch knows no pattern for what surrounds it"
        if kind == "all_gather":
            return "no matrix product takes the gathered tensor as its left side"
        if not graph_matmuls.is_matmul(graph_matmuls.scattered_tensor(node)):
            return "what is scattered is no matrix product of this graph, and no sum of such alone"
        return "refused by torch's fusion"


def gather_multiply(x_BSK: Tensor, weights_KN: list[Tensor], group_name: str) -> list[Tensor]:
    """The sequence, gathered along dimension 1, times each matrix, by torch's fused operator."""
    return torch.ops.symm_mem.fused_all_gather_matmul(x_BSK, weights_KN, 1, group_name)[1]


def multiply_scatter(x_BSK: Tensor, weight_KN: Tensor, group_name: str) -> Tensor:
    """The product, summed and scattered along dimension 1, by torch's fused operator."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x_BSK, weight_KN, "sum", 1, group_name)


@contextmanager
def _eligible(group_name: str) -> Iterator[None]:
    """Answer the questions that would end torch's fusions in silence."""
    # A build without NCCL cannot have a group on GPUs, and on a CPU the operators have kernels of ours. Symmetric
    # memory enables itself for a group when its first buffer is exchanged, and raises if it cannot.
    original = torch.distributed.is_nccl_available
    # monkeypatch: torch.distributed.is_nccl_available, while the fusions run. May go when they ask for the operators'
    # kernels instead. _test_mode answers the second question and may go when groups need no registration.
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
    fused_pairs = [f"all_gather_{matmul}" for matmul in ("matmul", "scaled_matmul")]
    fused_pairs += [f"{matmul}_reduce_scatter" for matmul in ("matmul", "scaled_matmul")]
    for pair in fused_pairs:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::fused_{pair}", "CPU"):
            library.impl(f"fused_{pair}", getattr(_symmetric_memory, f"_fused_{pair}_fallback"), "CPU")
    _LIBRARIES.append(library)
