"""Triton where it can be imported; where not, kernels stay plain functions that nobody calls.

A file of kernels imports ``jit``, ``tl`` and ``triton`` from here. Whether they run is decided in ``choice``.
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


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, launched as ``function[(programs,)](...)``."""
    return function if triton is None else triton.jit(function)


def operator(name: str, run: Callable[..., Any], empty: Callable[..., Any]) -> Any:
    """An operator of Triton kernels: torch.compile sees the launches, plans their memory and calls no Python.

    Args:
        name: with namespace. run: allocates and launches, by ``wrap_triton``; annotated, changes no argument.
        empty: what ``run`` returns, unfilled: for tracing where the kernels are no Triton programs (the interpreter).
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
    """The smallest power of two that is not below ``n`` >= 1."""
    return 1 << (n - 1).bit_length()
