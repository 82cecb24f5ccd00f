"""Triton where it can be imported; elsewhere kernels stay plain functions that nobody calls.

Kernel files import ``jit`` and ``tl`` from here. ``kernel_choice`` decides whether kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform
    triton = tl = None

__all__ = ["ceil_div", "jit", "next_power_of_2", "operator", "tl", "triton", "wrap_triton"]


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, launched as ``function[grid](...)``."""
    return function if triton is None else triton.jit(function)


def operator(name: str, run: Callable[..., Any], empty: Callable[..., Any]) -> Any:
    """A torch operator made of Triton kernels.

    As a ``triton_op`` torch.compile sees the launches themselves: no dispatcher and no Python between them, and their
    memory is planned with the rest of the graph.

    Args:
        name: with namespace. run: annotated; allocates outputs and launches by ``wrap_triton``; changes no argument.
        empty: returns outputs without values, for tracing where kernels are no Triton programs (the interpreter).
    """
    if triton is not None and not triton.knobs.runtime.interpret:
        return torch.library.triton_op(name, run, mutates_args=())
    opaque = torch.library.custom_op(name, run, mutates_args=())
    opaque.register_fake(empty)
    return opaque


def wrap_triton(kernel: Any) -> Any:
    """The kernel as the ``run`` of an ``operator`` launches it. torch looks for this name in the source of ``run``."""
    return kernel if triton.knobs.runtime.interpret else torch.library.wrap_triton(kernel)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= ``n`` >= 1. Triton's ranges and tiles have such sizes only."""
    return 1 << (n - 1).bit_length()


def ceil_div(size: int, block: int) -> int:
    """Number of blocks that cover ``size`` elements."""
    return -(-size // block)
