"""Attention of some queries over some of their keys, with what is needed to merge such partial attentions.

A partial attention returns its output o and the log-sum-exp l of its scores. Two of the same queries are merged by
l = log(e^l1 + e^l2), o = e^(l1-l) o1 + e^(l2-l) o2 (online softmax: Milakov and Gimelshein 2018). A Triton kernel does
so in one pass; plain PyTorch needs float32 copies of both outputs, their sum and its rounding.

The gradients of a partial attention are exact if its backward pass is given the output and the log-sum-exp over *all*
keys (Liu et al. 2023, Ring Attention). On a GPU the fused kernels of cuDNN or FlashAttention do the work. The plain
path is the reference, and what runs on a CPU and in float64.

Shapes: B batch, N query heads, K key/value heads (N a multiple of K), G = N/K, S queries, T keys, H head size.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.kernels.triton_support import ceil_div, jit, next_power_of_2, tl

AttentionKernel = Literal["cudnn", "flash", "plain"]
MERGE_ROWS, MERGE_WARPS = 16, 4


def choose_attention_kernel(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> AttentionKernel:
    """The fastest kernel for this device, dtype and head size (cuDNN from compute capability 9.0 on)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 128:
        return "plain"
    return "cudnn" if torch.cuda.get_device_capability(device) >= (9, 0) else "flash"


def partial_attention(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, causal: bool, kernel: AttentionKernel
) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, H] in q's dtype and log-sum-exp [B, N, S], float32 or wider. causal: query i sees keys 0..i."""
    if kernel != "plain":
        k, v = _repeat_heads(q_BNSH, k_BKTH, v_BKTH, kernel)
        return compat.attention_forward(q_BNSH, k, v, causal=causal, kernel=kernel)
    scores_BKGST = _scores(q_BNSH, k_BKTH, causal=causal)
    lse_BKGS = scores_BKGST.logsumexp(-1)
    probs_BKGST = (scores_BKGST - lse_BKGS.unsqueeze(-1)).exp()
    out_BKGSH = probs_BKGST @ v_BKTH.unsqueeze(2).to(probs_BKGST.dtype)
    return out_BKGSH.flatten(1, 2).to(q_BNSH.dtype), lse_BKGS.flatten(1, 2)


def partial_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, kernel: AttentionKernel
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients of q [B, N, S, H], k and v [B, K, T, H].
    ``grad``, ``out`` [B, N, S, H] and ``lse`` [B, N, S] are those over all keys.
    """
    if kernel != "plain":
        repeated = _repeat_heads(q, k, v, kernel)
        grad_q, grad_k, grad_v = compat.attention_backward(grad, q, *repeated, out, lse, causal=causal, kernel=kernel)
        return grad_q, _sum_repeated(grad_k, k), _sum_repeated(grad_v, v)
    groups = (k.shape[1], -1)
    scores_BKGST = _scores(q, k, causal=causal)
    wide = scores_BKGST.dtype
    probs_BKGST = (scores_BKGST - lse.unflatten(1, groups).unsqueeze(-1)).exp()
    grad_BKGSH = grad.unflatten(1, groups).to(wide)
    # Softmax's backward subtracts from each row of dP its mean under P. That is grad . out over all keys, which is why
    # the full output is needed.
    mean_BKGS1 = (grad_BKGSH * out.unflatten(1, groups)).sum(-1, keepdim=True)
    grad_probs_BKGST = grad_BKGSH @ v.unsqueeze(2).to(wide).transpose(-1, -2)
    grad_scores_BKGST = probs_BKGST * (grad_probs_BKGST - mean_BKGS1) / math.sqrt(q.shape[-1])
    grad_q = (grad_scores_BKGST @ k.unsqueeze(2).to(wide)).flatten(1, 2)
    grad_k = (grad_scores_BKGST.transpose(-1, -2) @ q.unflatten(1, groups).to(wide)).sum(2)
    grad_v = (probs_BKGST.transpose(-1, -2) @ grad_BKGSH).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def merge_(out_BNSH: Tensor, lse_BNS: Tensor, part_BNSH: Tensor, part_lse_BNS: Tensor, *, fused: bool) -> None:
    """Merge the second partial attention into the first, rounded to its dtypes; ``fused``: not in float64.
    Outputs: any float dtype up to float32, any strides, each head contiguous. lse: float32, any strides.
    """
    if not fused:
        merged_lse_BNS1 = torch.logaddexp(lse_BNS, part_lse_BNS).unsqueeze(-1)
        factor, part_factor = ((lse.unsqueeze(-1) - merged_lse_BNS1).exp() for lse in (lse_BNS, part_lse_BNS))
        out_BNSH.copy_(factor * out_BNSH + part_factor * part_BNSH)
        lse_BNS.copy_(merged_lse_BNS1.squeeze(-1))
        return
    batch, heads, queries, size = out_BNSH.shape
    assert out_BNSH.stride(3) == part_BNSH.stride(3) == 1 and part_BNSH.shape == out_BNSH.shape
    assert lse_BNS.dtype == part_lse_BNS.dtype == torch.float32 and part_lse_BNS.shape == lse_BNS.shape
    if out_BNSH.numel():
        tensors = out_BNSH, lse_BNS, part_BNSH, part_lse_BNS
        strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
        grid = ceil_div(queries, MERGE_ROWS), heads, batch
        tiling = {"ROWS": MERGE_ROWS, "SIZE": next_power_of_2(size), "num_warps": MERGE_WARPS}
        merge_kernel[grid](*tensors, queries, size, *strides, **tiling)


def _scores(q_BNSH: Tensor, k_BKTH: Tensor, *, causal: bool) -> Tensor:
    """Scaled scores [B, K, G, S, T] in float32 or wider; -inf where a query must not look."""
    wide = torch.promote_types(q_BNSH.dtype, torch.float32)
    q_BKGSH = q_BNSH.unflatten(1, (k_BKTH.shape[1], -1)).to(wide)
    scores = q_BKGSH @ k_BKTH.unsqueeze(2).to(wide).transpose(-1, -2) / math.sqrt(q_BNSH.shape[-1])
    if causal:
        is_visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~is_visible, -math.inf)
    return scores


def _repeat_heads(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, kernel: AttentionKernel) -> tuple[Tensor, Tensor]:
    """FlashAttention's operator wants a key head for every query head; cuDNN's knows groups."""
    group = q_BNSH.shape[1] // k_BKTH.shape[1]
    if kernel == "cudnn" or group == 1:
        return k_BKTH, v_BKTH
    return k_BKTH.repeat_interleave(group, dim=1), v_BKTH.repeat_interleave(group, dim=1)


def _sum_repeated(grad_BNTH: Tensor, like_BKTH: Tensor) -> Tensor:
    if grad_BNTH.shape[1] == like_BKTH.shape[1]:
        return grad_BNTH
    return grad_BNTH.unflatten(1, (like_BKTH.shape[1], -1)).sum(2)


@jit
def merge_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, queries, size, out_b, out_n, out_s, lse_b, lse_n, lse_s,
    part_b, part_n, part_s, part_lse_b, part_lse_n, part_lse_s, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program for ROWS queries of a head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    is_query = row < queries
    row = row.to(tl.int64)  # offsets of a long sequence exceed 2^31
    column = tl.arange(0, SIZE)
    inside = is_query[:, None] & (column < size)[None, :]
    lse_ptrs = lse_ptr + sequence * lse_b + head * lse_n + row * lse_s
    part_lse_ptrs = part_lse_ptr + sequence * part_lse_b + head * part_lse_n + row * part_lse_s
    lse = tl.load(lse_ptrs, mask=is_query, other=0.0)
    part_lse = tl.load(part_lse_ptrs, mask=is_query, other=0.0)
    larger = tl.maximum(lse, part_lse)  # subtracted before exponentials, which would overflow
    merged_lse = larger + tl.log(tl.exp(lse - larger) + tl.exp(part_lse - larger))
    out_ptrs = out_ptr + (sequence * out_b + head * out_n + row * out_s)[:, None] + column[None, :]
    part_ptrs = part_ptr + (sequence * part_b + head * part_n + row * part_s)[:, None] + column[None, :]
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32) * tl.exp(lse - merged_lse)[:, None]
    out += tl.load(part_ptrs, mask=inside, other=0.0).to(tl.float32) * tl.exp(part_lse - merged_lse)[:, None]
    tl.store(lse_ptrs, merged_lse, mask=is_query)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
