from __future__ import annotations

import pytest
import torch

from titanyaml.models.layers import RMSNorm, at_least_float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_is_formed_in_float32_or_wider_and_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(8, 512, generator=generator, dtype=torch.float64)).to(dtype)
    norm = RMSNorm(512, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(512, generator=generator, dtype=torch.float64))
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    got = norm(x)
    assert got.dtype == dtype
    # one rounding is half a unit in the last place; float32 arithmetic inside may add a little for float32 itself
    units = {torch.bfloat16: 0.51, torch.float32: 4.0, torch.float64: 8.0}[dtype]
    assert ((got.double() - exact).abs() <= units * torch.finfo(dtype).eps * exact.abs()).all()


def test_upcasts_never_narrow() -> None:
    assert [at_least_float32(t) for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.float64,
    ]
