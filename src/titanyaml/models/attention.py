"""Grouped-query attention, its masks and its key/value cache.

Shapes: B batch, S sequence, T attended positions, D model width, N query heads, K key/value heads, H head size,
P = H/2 rotary frequencies.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.schema import Model
from titanyaml.models.layers import Linear, RMSNorm, shared
from titanyaml.models.rope import rotate

Mask = Tensor | BlockMask


def document_mask(documents_BT: Tensor, rows_S: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> Mask:
    """Mask for queries at the positions ``rows_S`` (None: all): they attend to keys of their own document, none later.
    ``documents_BT``: int64 document of every position. ``dtype``: of queries and keys.
    """
    batch, length = documents_BT.shape
    if rows_S is None:
        rows_S = torch.arange(length, device=documents_BT.device)
    # FlexAttention has no backward pass on a CPU and does not take float64: these get bool [B, 1, S, T].
    if documents_BT.is_cuda and dtype != torch.float64:

        def may_attend(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (rows_S[q] >= k) & (documents_BT[b, rows_S[q]] == documents_BT[b, k])

        return _compiled_create_block_mask()(may_attend, batch, None, len(rows_S), length, device=documents_BT.device)
    same_document_BST = documents_BT[:, rows_S].unsqueeze(2) == documents_BT.unsqueeze(1)
    not_later_ST = rows_S.unsqueeze(1) >= torch.arange(length, device=rows_S.device)
    return (same_document_BST & not_later_ST).unsqueeze(1)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)  # eagerly it materialises the dense [B, S, T] mask


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # eagerly it materialises all scores


class KVCache:
    """Keys and values of earlier tokens, for generation; allocated at the first forward for ``length`` positions."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0
        # One buffer per layer, written in place: shapes stay the same from token to token.
        self.keys_BKTH: list[Tensor] = []
        self.values_BKTH: list[Tensor] = []

    def start(self, num_layers: int, *, shape: tuple[int, int, int, int], like: Tensor) -> None:
        """Allocate zeros of ``shape`` (B, K, T, H) for every layer in ``like``'s dtype, unless allocated already."""
        if not self.keys_BKTH:
            self.keys_BKTH = [like.new_zeros(shape) for _ in range(num_layers)]
            self.values_BKTH = [like.new_zeros(shape) for _ in range(num_layers)]

    def advance(self, count: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
        """Reserve ``count`` positions; return them [S] and the mask [S, T] of the positions they may attend to."""
        positions_S = torch.arange(self.position, self.position + count, device=device)
        self.position += count
        assert self.position <= self.length, f"{self.position} tokens in a cache of {self.length}"
        return positions_S, torch.arange(self.length, device=device) <= positions_S.unsqueeze(1)


class Attention(nn.Module):
    """Causal attention in which N / K query heads share a key/value head (Ainslie et al. 2023, GQA)."""

    def __init__(self, spec: Model, *, rotary: bool = True) -> None:
        super().__init__()
        shape = DecoderShape.of(spec)
        self.head_dim, self.rotary, self.eps = shape.head_dim, rotary, spec.norm_eps
        self.qk_l2_norm = spec.qk_l2_norm and rotary  # as in Llama 4: only where rotation is
        self.grouped = spec.num_kv_heads != spec.num_heads
        self.wq = Linear(spec.dim, shape.query_dim, bias=spec.attention_bias)
        self.wk = Linear(spec.dim, shape.kv_dim, bias=spec.attention_bias)
        self.wv = Linear(spec.dim, shape.kv_dim, bias=spec.attention_bias)
        self.wo = Linear(shape.query_dim, spec.dim, bias=spec.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=spec.norm_eps) if spec.qk_norm else None

    def forward(
        self,
        x_BSD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        mask: Mask | None = None,
        keys_BKTH: Tensor | None = None,
        values_BKTH: Tensor | None = None,
        positions_S: Tensor | None = None,
        temperature_S: Tensor | None = None,
    ) -> Tensor:
        """Attend; arguments as of ``decoder.TransformerBlock.forward``."""
        # The number of heads is inferred (-1): under tensor parallelism this rank has fewer than the configuration.
        x = shared(x_BSD, self.wq, self.wk, self.wv)
        q_BSNH = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k_BSKH = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v_BSKH = self.wv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNH, k_BSKH = self.q_norm(q_BSNH), self.k_norm(k_BSKH)
        if self.rotary:
            q_BSNH, k_BSKH = rotate(q_BSNH, cos_SP, sin_SP), rotate(k_BSKH, cos_SP, sin_SP)
        elif temperature_S is not None:
            q_BSNH = (q_BSNH * temperature_S.view(-1, 1, 1)).to(q_BSNH.dtype)
        if self.qk_l2_norm:
            q_BSNH, k_BSKH = (F.rms_norm(t, (self.head_dim,), eps=self.eps) for t in (q_BSNH, k_BSKH))
        q_BNSH, k_BKTH, v_BKTH = (t.transpose(1, 2) for t in (q_BSNH, k_BSKH, v_BSKH))
        if keys_BKTH is not None and values_BKTH is not None:
            assert positions_S is not None
            k_BKTH = keys_BKTH.index_copy_(2, positions_S, k_BKTH)
            v_BKTH = values_BKTH.index_copy_(2, positions_S, v_BKTH)
        out_BNSH = self.attend(q_BNSH, k_BKTH, v_BKTH, mask)
        projected: Tensor = self.wo(out_BNSH.transpose(1, 2).flatten(2))
        return projected

    # A method of its own: context parallelism replaces it, see ``BlockLayout.attention``.
    def attend(self, q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Mask | None) -> Tensor:
        """Scaled dot-product attention: causal without a mask, else exactly what the mask allows."""
        if isinstance(mask, BlockMask):
            return _compiled_flex_attention()(q_BNSH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=self.grouped)
        if self.grouped and mask is not None:
            # With a mask only cuDNN's kernel supports groups. Without cuDNN, torch would fall back to the math kernel,
            # which holds all scores; repeated heads keep a memory-efficient one.
            heads_per_group = q_BNSH.shape[1] // k_BKTH.shape[1]
            k_BKTH, v_BKTH = (t.repeat_interleave(heads_per_group, dim=1) for t in (k_BKTH, v_BKTH))
        return F.scaled_dot_product_attention(
            q_BNSH, k_BKTH, v_BKTH, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped and mask is None
        )
