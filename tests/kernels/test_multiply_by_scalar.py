from __future__ import annotations

import pytest
import torch

from titanyaml.kernels import multiply_by_scalar


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0,), (7,), (33, 20)], ids=str)
def test_equals_plain_pytorch_to_the_bit(monkeypatch, device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In whole and incomplete blocks; the factor is no bfloat16 number."""
    monkeypatch.setattr(multiply_by_scalar, "BLOCK", 64)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    factor = torch.tensor(1 / 3, device=device)
    before = x.clone()
    ours = multiply_by_scalar.multiply_by_scalar(x, factor, fused=True)
    assert torch.equal(ours, multiply_by_scalar.multiply_by_scalar(x, factor, fused=False)) and torch.equal(x, before)
    assert torch.equal(ours, (x.double() * factor.double()).to(dtype)) or dtype == torch.float32
