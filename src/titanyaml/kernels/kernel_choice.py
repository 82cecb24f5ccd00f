"""Which kernels a run gets: its own Triton ones, or those of plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titanyaml.errors import ConfigError
from titanyaml.kernels import triton_support


@dataclass(frozen=True)
class KernelChoice:
    """Whether the Triton kernels run, and why, in words for the log."""

    fused: bool
    reason: str


def choose_kernels(name: str, *, device: torch.device, dtype: torch.dtype) -> KernelChoice:
    """Resolve ``kernels.name`` (auto, torch or fused) for this run; ConfigError where fused ones cannot run."""
    if name == "torch":
        return KernelChoice(False, "kernels=torch")
    missing = _missing(device, dtype)
    if missing and name == "fused":
        raise ConfigError(f"is fused, but {missing}", key="kernels.name", hint="kernels=torch or kernels=auto")
    return KernelChoice(not missing, f"kernels={name}" + (f", {missing}" if missing else ""))


def _missing(device: torch.device, dtype: torch.dtype) -> str:
    """What keeps the fused kernels from running; empty if they run."""
    if device.type != "cuda":
        return f"computing on {device.type}"
    if triton_support.triton is None:
        return "triton cannot be imported"
    # the kernels compute in float32
    return "computing in float64" if dtype == torch.float64 else ""
