from __future__ import annotations

import pytest
import torch

from tests.kernels.references import square_sum_reference
from titanyaml.distributed.norm import grad_norm
from titanyaml.kernels import square_sum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_float64(monkeypatch, device, dtype: torch.dtype) -> None:
    """Whole and incomplete parts, an empty tensor and one that is not contiguous."""
    monkeypatch.setattr(square_sum, "BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    shapes = [(300,), (7, 40), (0,), (1,)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    tensors.append(torch.randn(20, 30, generator=generator).to(device, dtype).t())
    torch.testing.assert_close(square_sum.square_sum(tensors), square_sum_reference(tensors), rtol=1e-6, atol=0)
    plain, fused = grad_norm(tensors), grad_norm(tensors, square_sum=square_sum.square_sum)
    torch.testing.assert_close(fused, plain, rtol=1e-6 if dtype == torch.float32 else 1e-5, atol=0)


def test_one_number_that_is_not_finite_shows(device) -> None:
    tensors = [torch.ones(5, device=device), torch.tensor([1.0, float("nan")], device=device)]
    assert square_sum.square_sum(tensors).isnan()
