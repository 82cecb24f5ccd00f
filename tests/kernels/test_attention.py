"""Parts of an attention put together are the attention, forward and backward, for every kernel of this machine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titanyaml.kernels.attention import choose_attention_kernel, merge_, partial_attention, partial_attention_backward

KERNELS = ["plain"] if not torch.cuda.is_available() else ["plain", "flash", "cudnn"]


def draw(kernel: str, heads: int, kv_heads: int, queries: int, keys: int) -> list[Tensor]:
    """q, k, v and the gradient of the output: float64, or what the fused kernels take."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64} if kernel == "plain" else {"dtype": torch.bfloat16, "device": "cuda"}
    size = 16 if kernel == "plain" else 64
    shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    return [torch.randn(2, *shape, size).to(**options) for shape in shapes]


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor) -> list[Tensor]:
    """Output and gradients of the public function, in float64."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def close(kernel: str, grads_found: list[Tensor], wanted: list[Tensor]) -> bool:
    bound = 1e-13 if kernel == "plain" else 1e-2
    return all((f.double() - w).norm() <= bound * w.norm() for f, w in zip(grads_found, wanted, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_causal_part_is_causal_attention(kernel: str, heads: int, kv_heads: int) -> None:
    q, k, v, grad = draw(kernel, heads, kv_heads, 32, 32)
    out, lse = partial_attention(q, k, v, causal=True, kernel=kernel)
    assert out.dtype == q.dtype and lse.shape == q.shape[:3] and lse.dtype in (torch.float32, torch.float64)
    grads = partial_attention_backward(grad, q, k, v, out, lse, causal=True, kernel=kernel)
    mask = torch.ones(32, 32, dtype=torch.bool, device=q.device).tril()
    assert close(kernel, [out, *grads], reference(q, k, v, grad, mask))
    assert [g.dtype for g in grads] == [t.dtype for t in (q, k, v)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_two_parts_merge_to_the_whole(kernel: str, heads: int, kv_heads: int) -> None:
    """The tail half of the queries: all of the first 32 keys, and causally their own 32."""
    q, k, v, grad = draw(kernel, heads, kv_heads, 32, 64)
    early, late = (k[:, :, :32], v[:, :, :32]), (k[:, :, 32:], v[:, :, 32:])
    out, lse = partial_attention(q, *late, causal=True, kernel=kernel)
    merge_(out, lse, *partial_attention(q, *early, causal=False, kernel=kernel), fused=kernel != "plain")
    first = partial_attention_backward(grad, q, *early, out, lse, causal=False, kernel=kernel)
    second = partial_attention_backward(grad, q, *late, out, lse, causal=True, kernel=kernel)
    grads_found = [
        out,
        first[0] + second[0],
        *(torch.cat(pair, dim=2) for pair in zip(first[1:], second[1:], strict=True)),
    ]
    mask = torch.ones(32, 64, dtype=torch.bool, device=q.device).tril(32)
    assert close(kernel, grads_found, reference(q, k, v, grad, mask))


def test_the_plain_path_is_for_what_the_fused_kernels_do_not_take() -> None:
    assert choose_attention_kernel(torch.device("cpu"), torch.bfloat16, head_dim=64) == "plain"
    assert choose_attention_kernel(torch.device("cuda"), torch.float32, head_dim=64) == "plain"
    assert choose_attention_kernel(torch.device("cuda"), torch.bfloat16, head_dim=100) == "plain"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_merge_kernel_equals_plain_pytorch(device, dtype: torch.dtype) -> None:
    """Slices of positions, other memory orders, a head size and a number of queries that fill no block."""
    torch.manual_seed(0)
    out, part = (torch.randn(2, 19, 3, 24).to(device, dtype).transpose(1, 2) for _ in range(2))
    lse, part_lse = (4 * torch.randn(2, 3, 19, device=device) for _ in range(2))
    part_lse[0, 0, 3] = -80.0  # next to nothing is there
    merged, expected = ([out.clone(), lse.clone(), part, part_lse] for _ in range(2))
    for fused, tensors in ((True, merged), (False, expected)):
        merge_(*(t[:, :, 2:] for t in tensors), fused=fused)
    assert torch.equal(merged[0][:, :, :2], out[:, :, :2]) and not torch.equal(merged[0], out)
    torch.testing.assert_close(merged[1], expected[1], rtol=1e-6, atol=1e-6)
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(merged[0], expected[0], rtol=bound, atol=1e-6)
