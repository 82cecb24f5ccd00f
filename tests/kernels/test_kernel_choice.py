from __future__ import annotations

import pytest
import torch

from titanyaml.errors import ConfigError
from titanyaml.kernels import kernel_choice
from titanyaml.kernels.kernel_choice import choose_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "dtype", "fused", "reason"),
    [
        ("torch", CUDA, torch.bfloat16, False, "kernels=torch"),
        ("auto", CUDA, torch.bfloat16, True, "kernels=auto"),
        ("fused", CUDA, torch.float32, True, "kernels=fused"),
        ("auto", CPU, torch.bfloat16, False, "kernels=auto, computing on cpu"),
        ("auto", CUDA, torch.float64, False, "kernels=auto, computing in float64"),
    ],
)
def test_choice(monkeypatch, name: str, device: torch.device, dtype: torch.dtype, fused: bool, reason: str) -> None:
    monkeypatch.setattr(kernel_choice.triton_support, "triton", object())
    assert choose_kernels(name, device=device, dtype=dtype) == kernel_choice.KernelChoice(fused, reason)


def test_without_triton(monkeypatch) -> None:
    monkeypatch.setattr(kernel_choice.triton_support, "triton", None)
    assert not choose_kernels("auto", device=CUDA, dtype=torch.bfloat16).fused
    with pytest.raises(ConfigError, match="triton cannot be imported"):
        choose_kernels("fused", device=CUDA, dtype=torch.bfloat16)


def test_fused_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="computing on cpu"):
        choose_kernels("fused", device=CPU, dtype=torch.float32)
