"""Attention of some queries over some of their keys, with what is needed to merge such partial attentions.

A partial attention returns its output and the log-sum-exp of its scores. Two of the same queries are merged by these
(online softmax: Milakov and Gimelshein 2018). Its gradients are exact if its backward pass is given the output and the
log-sum-exp over *all* keys (Liu et al. 2023, Ring Attention). On a GPU the fused kernels of cuDNN or FlashAttention do
the work. The plain path below is the reference, and what runs on a CPU and in float64.

Shapes: B batch, N query heads, K key/value heads (N a multiple of K), G = N/K, S queries, T keys, H head size.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.kernels import attention_merge

AttentionKernel = Literal["cudnn", "flash", "plain"]


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
    """Merge the second partial attention into the first, rounded to its dtypes; ``fused``: by the Triton kernel."""
    (attention_merge.merge_ if fused else attention_merge.reference_)(out_BNSH, lse_BNS, part_BNSH, part_lse_BNS)


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
    """Sum the gradients of the copies of a key/value head."""
    if grad_BNTH.shape[1] == like_BKTH.shape[1]:
        return grad_BNTH
    return grad_BNTH.unflatten(1, (like_BKTH.shape[1], -1)).sum(2)
