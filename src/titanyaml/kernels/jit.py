"""Triton where it can be imported; where not, kernels stay plain functions that nobody calls.

A file of kernels imports ``jit``, ``tl`` and ``triton`` from here. Whether they run is decided in ``choice``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform
    triton = tl = None


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, launched as ``function[(programs,)](...)``."""
    return function if triton is None else triton.jit(function)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n`` >= 1."""
    return 1 << (n - 1).bit_length()
