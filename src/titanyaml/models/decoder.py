"""The decoder: dense and mixture models in one module; sizes and variants come from ``schema.Model``.

It knows nothing of parallelism, precision or the loop. It computes in the dtype of its weights; norms, rotary angles
and losses are formed in float32 or wider.

Shapes: B batch, S sequence, D model width, V vocabulary, P rotary frequencies, K key/value heads, T attended positions,
H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.rules import model as sizes
from titanyaml.config.schema import Model
from titanyaml.errors import ConfigError
from titanyaml.models import rope
from titanyaml.models.attention import Attention, KVCache, Mask, document_mask
from titanyaml.models.layers import FeedForward, OutputProjection, RMSNorm
from titanyaml.models.moe import Experts, MixtureOfExperts
from titanyaml.models.protocol import BlockLayout, ModelFacts

#: (hidden_BSD, head weight_VD, labels_BS or None) -> result of the forward
HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class TransformerBlock(nn.Module):
    """Pre-norm residual block. Its forward takes tensors only, so that a plugin can wrap ``forward`` in place."""

    attention: Attention

    def __init__(self, spec: Model, index: int) -> None:
        super().__init__()
        kind = DecoderShape.of(spec).kind(index)
        self.attention_norm = RMSNorm(spec.dim, eps=spec.norm_eps)
        self.attention = Attention(spec, rotary=kind.rotary)
        self.ffn_norm = RMSNorm(spec.dim, eps=spec.norm_eps)
        self.feed_forward = MixtureOfExperts(spec) if kind.mixture else FeedForward(spec.dim, ffn_dim=spec.ffn_dim)

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
        """Return the residual stream [B, S, D] after this block.

        Args:
            x_BSD: residual stream.
            cos_SP, sin_SP: rotary tables of these positions, float32 or wider.
            mask: of ``attention.document_mask``, or bool, broadcast to [B, heads, S, T]; None: causal.
            keys_BKTH, values_BKTH: this layer's cache, written in place at positions_S; None outside generation.
            temperature_S: factors on queries without rotary embedding, float32 or wider; None: all 1.
        """
        h_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.attention(h_BSD, cos_SP, sin_SP, mask, keys_BKTH, values_BKTH, positions_S, temperature_S)
        ffn_BSD: Tensor = self.feed_forward(self.ffn_norm(x_BSD))
        return x_BSD + ffn_BSD


class Decoder(nn.Module):
    """Token ids to logits, or to a loss. A pipeline stage is a decoder too, see ``part``.
    A ConfigError says that heads or channels do not divide, or factors of ``rope_scaling`` are not in order.
    """

    embeds = heads = True  # whether this decoder starts with the embedding, and ends with final norm and head
    spec: Model
    tok_embeddings: nn.Embedding | None
    layers: nn.ModuleList | nn.ModuleDict
    norm: RMSNorm | None
    output: OutputProjection | None
    facts: ModelFacts

    def __init__(self, spec: Model) -> None:
        super().__init__()
        _check_sizes(spec)
        self.spec = spec
        self.tok_embeddings = nn.Embedding(spec.vocab_size, spec.dim)
        self.layers = nn.ModuleList(TransformerBlock(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.dim, eps=spec.norm_eps)
        # Tied: the embedding's weight is read twice. A second parameter could come untied, in a cast or a checkpoint.
        self.output = None if spec.tie_embeddings else OutputProjection(spec.dim, vocab_size=spec.vocab_size)
        self._register_tables(self.tok_embeddings.weight.device)
        self.facts = _facts(self)

    def part(self, blocks: Sequence[str], *, embeds: bool, heads: bool) -> Decoder:
        """Make a decoder of consecutive ``blocks`` that shares modules with this one; chained parts equal the whole.
        Without ``embeds`` it takes the residual stream; without ``heads`` (final norm and head) it returns it.
        """
        part = Decoder.__new__(Decoder)
        nn.Module.__init__(part)
        part.spec, part.embeds, part.heads = self.spec, embeds, heads
        # a tied head reads the embedding's weight
        part.tok_embeddings = self.tok_embeddings if embeds or (heads and self.output is None) else None
        # a ModuleDict by block number: parameters keep the names that they have in the whole model, as checkpoints need
        part.layers = nn.ModuleDict({name.rpartition(".")[2]: self.get_submodule(name) for name in blocks})
        part.norm = self.norm if heads else None
        part.output = self.output if heads else None
        part._register_tables(self.rope_cos_TP.device)
        facts = self.facts
        part.facts = replace(
            facts,
            blocks=tuple(blocks),
            layouts=tuple(facts.layouts[facts.blocks.index(name)] for name in blocks),
            embedding=facts.embedding if part.tok_embeddings is not None else "",
            head=facts.head if heads else "",
            final_norm=facts.final_norm if heads else "",
        )
        return part

    def _register_tables(self, device: torch.device) -> None:
        for name in ("rope_cos_TP", "rope_sin_TP", *(["temperature_T"] if self.spec.attention_temperature else [])):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.init_buffers(device)

    def init_buffers(self, device: torch.device, *, dtype: torch.dtype = torch.float32) -> None:
        """Compute the rotary and temperature tables of all positions on ``device``; ``dtype`` float32 or float64."""
        spec = self.spec
        frequencies_P = rope.inverse_frequencies(
            DecoderShape.of(spec).head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling, dtype=dtype
        )
        self.rope_cos_TP, self.rope_sin_TP = rope.tables(frequencies_P, length=spec.max_seq_len, device=device)
        if spec.attention_temperature:
            self.temperature_T = rope.temperatures(
                length=spec.max_seq_len,
                strength=spec.attention_temperature,
                floor=spec.attention_temperature_floor,
                dtype=dtype,
                device=device,
            )

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        documents_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        positions_S: Tensor | None = None,
        rows_S: Tensor | None = None,
        loss_fn: HeadFunction | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Run the model.

        Args:
            tokens_BS: int64 ids; positions are 0..S-1, or continue those of ``cache``. A part that does not embed
                takes the residual stream [B, S, D], whose S may be a slice of the labels'.
            documents_BS: int64 document index of each attended token; read where ``model.document_mask`` is on.
            labels_BS: passed to ``loss_fn``.
            positions_S: int64 positions of the tokens where they are part of a longer sequence.
            rows_S: positions of attention's queries where they are not those of ``documents_BS``.
            loss_fn: computes the result from final hidden states, head weight and labels.
            cache: keys and values of earlier tokens of one document (generation); extended in place.

        Returns:
            ``loss_fn``'s result, else logits [B, S, V] in the weights' dtype; the residual stream of a headless part.

        Raises:
            ConfigError: the sequence is longer than ``model.max_seq_len``.
        """
        # Under sequence parallelism the residual stream holds a slice of the sequence only; the labels are whole.
        sequence = tokens_BS if self.embeds else labels_BS
        assert sequence is not None
        count = sequence.shape[1]
        start = cache.position if cache is not None else 0
        if start + count > self.spec.max_seq_len:
            raise ConfigError(
                f"{start + count} tokens exceed model.max_seq_len={self.spec.max_seq_len}",
                key="train.seq_len",
                hint=f"train.seq_len={self.spec.max_seq_len}",
            )
        h_BSD = self.tok_embeddings(tokens_BS) if self.embeds and self.tok_embeddings is not None else tokens_BS
        positions = slice(start, start + count) if positions_S is None else positions_S
        cos_SP, sin_SP = self.rope_cos_TP[positions], self.rope_sin_TP[positions]
        temperature_S = self.temperature_T[positions] if self.spec.attention_temperature else None
        if cache is not None:
            h_BSD = self._run_cached(h_BSD, cos_SP, sin_SP, temperature_S, cache)
        else:
            full_mask, chunk_mask = self._masks(documents_BS, rows_S, count, h_BSD.dtype)
            for block in self._blocks():
                mask = chunk_mask if block.attention.rotary else full_mask
                h_BSD = block(h_BSD, cos_SP, sin_SP, mask, temperature_S=temperature_S)
        if self.norm is None:
            return h_BSD
        h_BSD = self.norm(h_BSD)
        head = self.tok_embeddings if self.output is None else self.output
        assert head is not None
        # The loss is computed here, inside the forward: only while a module's forward runs does FSDP have its weight
        # gathered, and a chunked loss needs the head's as a whole.
        return F.linear(h_BSD, head.weight) if loss_fn is None else loss_fn(h_BSD, head.weight, labels_BS)

    def _blocks(self) -> Iterable[Any]:
        """The transformer blocks; torch's containers are typed as holding any module."""
        return self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers

    def _masks(
        self, documents_BT: Tensor | None, rows_S: Tensor | None, count: int, dtype: torch.dtype
    ) -> tuple[Mask | None, Mask | None]:
        """Masks of blocks without and with rotary embedding; they differ where the sequence exceeds a chunk."""
        chunk, full_mask = self.spec.attention_chunk, None
        if not self.spec.document_mask:
            documents_BT = None
        else:
            assert documents_BT is not None, "model.document_mask is on and documents_BS is missing"
            full_mask, count = document_mask(documents_BT, rows_S, dtype=dtype), documents_BT.shape[1]
        if chunk is None or count <= chunk:
            return full_mask, full_mask
        # Blocks with rotary embedding attend within chunks (Llama 4): a chunk of a document is a document by itself.
        chunks_T = torch.arange(count, device=self.rope_cos_TP.device) // chunk
        documents_BT = chunks_T.unsqueeze(0) if documents_BT is None else documents_BT * count + chunks_T
        return full_mask, document_mask(documents_BT, rows_S, dtype=dtype)

    def _run_cached(
        self, h_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor, temperature_S: Tensor | None, cache: KVCache
    ) -> Tensor:
        batch, count, _ = h_BSD.shape
        shape = (batch, self.spec.num_kv_heads, cache.length, self.facts.head_dim)
        cache.start(len(self.layers), shape=shape, like=h_BSD)
        positions_S, full_mask_ST = cache.advance(count, device=h_BSD.device)
        chunk_mask_ST, chunk = full_mask_ST, self.spec.attention_chunk
        if chunk is not None and cache.length > chunk:
            positions_T = torch.arange(cache.length, device=h_BSD.device)
            chunk_mask_ST = full_mask_ST & ((positions_S // chunk).unsqueeze(1) == positions_T // chunk)
        for block, keys_BKTH, values_BKTH in zip(self._blocks(), cache.keys_BKTH, cache.values_BKTH, strict=True):
            mask = chunk_mask_ST if block.attention.rotary else full_mask_ST
            h_BSD = block(h_BSD, cos_SP, sin_SP, mask, keys_BKTH, values_BKTH, positions_S, temperature_S)
        return h_BSD


def build(spec: Model) -> Decoder:
    """Build the decoder on meta, without memory or values; ``models.init.materialise`` gives it both."""
    with torch.device("meta"):
        return Decoder(spec)


def _check_sizes(spec: Model) -> None:
    """Refuse what the rules on configurations refuse, for decoders that are built without one."""
    rules = (sizes.kv_heads_divide_heads, sizes.head_dim_is_even, sizes.rope_scaling_factors_are_ordered)
    if problems := [problem for rule in rules if (problem := rule(SimpleNamespace(model=spec)))]:
        raise ConfigError(problems)


def _facts(model: Decoder) -> ModelFacts:
    spec = model.spec
    # Counted on the built module, not by a formula: the counts are right for every variant that can be built.
    num_params = sum(p.numel() for p in model.parameters())
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    num_idle_params = sum(p[spec.moe.top_k :].numel() for module in experts for p in module.parameters())
    assert model.tok_embeddings is not None
    return ModelFacts(
        blocks=tuple(f"layers.{i}" for i in range(spec.num_layers)),
        embedding="tok_embeddings",
        head="tok_embeddings" if spec.tie_embeddings else "output",
        final_norm="norm",
        num_params=num_params,
        num_active_params=num_params - num_idle_params,
        num_embedding_params=model.tok_embeddings.weight.numel(),
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=DecoderShape.of(spec).head_dim,
        dim=spec.dim,
        ffn_dim=spec.ffn_dim,
        vocab_size=spec.vocab_size,
        max_seq_len=spec.max_seq_len,
        tied=spec.tie_embeddings,
        layouts=tuple(_layout(spec, i) for i in range(spec.num_layers)),
        num_experts=spec.moe.num_experts,
    )


def _layout(spec: Model, index: int) -> BlockLayout:
    """Layout of block ``index``; of a mixture only the shared expert is a dense feed-forward."""
    mixture = DecoderShape.of(spec).kind(index).mixture
    feed_forwards = ["feed_forward"]
    if mixture:
        feed_forwards = ["feed_forward.shared"] if spec.moe.shared_ffn_dim else []
    ffn_columns = [f"{ffn}.{weight}" for ffn in feed_forwards for weight in ("w1", "w3")]
    return BlockLayout(
        entries=("attention", *feed_forwards),
        attention="attention",
        column=("attention.wq", "attention.wk", "attention.wv", *ffn_columns),
        row=("attention.wo", *(f"{ffn}.w2" for ffn in feed_forwards)),
        stream_norms=("attention_norm", "ffn_norm"),
        head_norms=("attention.q_norm", "attention.k_norm") if spec.qk_norm else (),
        router="feed_forward.router" if mixture else "",
        experts="feed_forward.experts" if mixture else "",
    )
