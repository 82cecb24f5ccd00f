from __future__ import annotations

import pytest
import torch

from titanyaml.kernels.attention_merge import merge_, reference_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_its_reference(device, dtype: torch.dtype) -> None:
    """Slices of positions, other memory orders, a head size and a number of queries that fill no block."""
    torch.manual_seed(0)
    out, part = (torch.randn(2, 19, 3, 24).to(device, dtype).transpose(1, 2) for _ in range(2))
    lse, part_lse = (4 * torch.randn(2, 3, 19, device=device) for _ in range(2))
    part_lse[0, 0, 3] = -80.0  # next to nothing is there
    merged, expected = ([out.clone(), lse.clone(), part, part_lse] for _ in range(2))
    for merge, tensors in ((merge_, merged), (reference_, expected)):
        merge(*(t[:, :, 2:] for t in tensors))
    assert torch.equal(merged[0][:, :, :2], out[:, :, :2]) and not torch.equal(merged[0], out)
    torch.testing.assert_close(merged[1], expected[1], rtol=1e-6, atol=1e-6)
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(merged[0], expected[0], rtol=bound, atol=1e-6)
