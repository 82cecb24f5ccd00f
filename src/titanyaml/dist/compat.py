"""The only home of private torch API, so that a new torch release has one file to break.

Checked with torch 2.11 to 2.13. A name that a release took away gets a public, slower way where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of this rank that exists now."""
    return list(distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Change the time-out of a live process group; torch has no public function for it."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def foreach_norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """``torch.linalg.vector_norm`` of each tensor, accumulated in ``dtype``; a few kernels in all on a GPU."""
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place by the 0-dim ``factor``."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, rounding to the target's dtype."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@dataclass(frozen=True)
class CompileCounts:
    """What torch.compile has done in this process: graphs built, and why a graph broke with how often."""

    graphs: int = 0
    breaks: Counter[str] = field(default_factory=Counter)

    def __sub__(self, earlier: CompileCounts) -> CompileCounts:
        return CompileCounts(self.graphs - earlier.graphs, self.breaks - earlier.breaks)


def compile_counts() -> CompileCounts:
    """The counts up to now; the difference of two is what happened between them."""
    from torch._dynamo.utils import counters  # seconds to import, and only needed where something is compiled

    return CompileCounts(counters["stats"]["unique_graphs"], Counter(counters["graph_break"]))


def guard_module_hooks() -> None:
    """Make torch.compile look at the hooks of a module before it reuses a graph.

    By default it does not, and a block that carries a hook is silently run by the graph of one that does not.
    """
    import torch._dynamo.config as config

    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Stand as rank 0 of ``world_size`` ranks that do not exist: collectives return at once, without data."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - torch 2.11 registers the backend here

    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
