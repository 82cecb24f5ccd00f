"""Shape of a decoder: kinds of blocks, weight matrices, parameters, FLOPs of a token. No torch.

Rules and the planner count with it. Counts equal those of the module that ``models.decoder`` builds (tests compare
both), but for biases (``model.attention_bias``), which are left out: below 0.1 % of the parameters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LinearShape:
    """One weight matrix of a block."""

    name: str
    inputs: int
    outputs: int
    column: bool  # tensor parallelism splits the outputs; else the inputs
    reads: str  # name of its input; matrices with the same one share its float8 cast

    @property
    def params(self) -> int:
        return self.inputs * self.outputs

    def local(self, tp: int) -> tuple[int, int]:
        """(inputs, outputs) on one of ``tp`` ranks."""
        return (self.inputs, self.outputs // tp) if self.column else (self.inputs // tp, self.outputs)


@dataclass(frozen=True)
class MixtureShape:
    """The router and the experts of a mixture block."""

    num_experts: int
    top_k: int  # experts of a token
    ffn_dim: int  # inner width of an expert
    shared_ffn_dim: int = 0  # inner width of the expert that every token passes; 0: none
    first_dense: int = 0  # leading blocks that stay dense
    every: int = 1  # the last block of each so many is a mixture
    balanced_by_loss: bool = False  # tp ranks all-reduce the router's scores for a balance loss


@dataclass(frozen=True)
class BlockKind:
    """In what the blocks of one decoder may differ."""

    mixture: bool = False  # the feed-forward is a mixture of experts
    rotary: bool = True  # queries and keys are rotated
    chunk: int | None = None  # attention is local to chunks of so many tokens; None: all tokens


@dataclass(frozen=True)
class DecoderShape:
    """A decoder."""

    name: str
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    tied: bool = False
    gated: bool = True  # SwiGLU: w1 gate, w3 up, w2 down; else w3 and w2 alone
    rotary: bool = True
    head_norms: bool = False  # each query and key head has a norm
    mixture: MixtureShape | None = None
    nope_every: int = 0  # the last block of each so many has no rotation; 0: all have
    attention_chunk: int | None = None  # tokens within which blocks with rotation attend

    @classmethod
    def of(cls, model: Any) -> DecoderShape:
        """The shape of a ``schema.Model``, or of a rule's view of one."""
        moe, mixture = model.moe, None
        if moe.num_experts:
            widths, placement = (moe.ffn_dim or model.ffn_dim, moe.shared_ffn_dim), (moe.first_dense, moe.every)
            mixture = MixtureShape(moe.num_experts, moe.top_k, *widths, *placement, moe.balance_loss > 0)
        names = ("name", "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
        return cls(
            **{name: getattr(model, name) for name in (*names, "nope_every", "attention_chunk")},
            head_dim=model.head_dim or model.dim // model.num_heads,
            tied=model.tie_embeddings,
            head_norms=model.qk_norm,
            mixture=mixture,
        )

    @property
    def query_dim(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def experts(self) -> MixtureShape:
        """The mixture of a decoder that has one."""
        assert self.mixture is not None, "a dense decoder has no experts"
        return self.mixture

    @property
    def blocks(self) -> tuple[BlockKind, ...]:
        return tuple(map(self.kind, range(self.num_layers)))

    def kind(self, layer: int) -> BlockKind:
        moe = self.mixture
        mixture = moe is not None and layer >= moe.first_dense and (layer + 1) % moe.every == 0
        rotary = self.rotary and not (self.nope_every and (layer + 1) % self.nope_every == 0)
        return BlockKind(mixture, rotary, self.attention_chunk if rotary else None)

    @property
    def attention_linears(self) -> tuple[LinearShape, ...]:
        """Attention's matrices in the order of the forward pass."""
        d, q, k = self.dim, self.query_dim, self.kv_dim
        outputs = {"wq": q, "wk": k, "wv": k}
        inner = [LinearShape(name, d, features, True, "attention_in") for name, features in outputs.items()]
        return (*inner, LinearShape("wo", q, d, False, "attended"))

    def ffn_linears(self, width: int) -> tuple[LinearShape, ...]:
        """The matrices of a feed-forward of this inner width; none where it is 0."""
        if not width:
            return ()
        names = ("w1", "w3") if self.gated else ("w3",)
        inner = [LinearShape(name, self.dim, width, True, "ffn_in") for name in names]
        return (*inner, LinearShape("w2", width, self.dim, False, "product"))

    def width(self, block: BlockKind) -> int:
        """Inner width of the feed-forward that every token passes: the dense or the shared one; 0: there is none."""
        return self.experts.shared_ffn_dim if block.mixture else self.ffn_dim

    def linears_of(self, block: BlockKind) -> tuple[LinearShape, ...]:
        """Matrices that every token meets; the router's is not among them."""
        return (*self.attention_linears, *self.ffn_linears(self.width(block)))

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """The matrices of all kinds of blocks, one of each name."""
        return tuple({linear.name: linear for block in self.blocks for linear in self.linears_of(block)}.values())

    @property
    def norm_params(self) -> int:
        return 2 * self.dim + (2 * self.head_dim if self.head_norms else 0)

    @property
    def router_params(self) -> int:
        return self.experts.num_experts * self.dim

    @property
    def expert_params(self) -> int:
        return 3 * self.dim * self.experts.ffn_dim

    def block_params(self, block: BlockKind) -> int:
        """Parameters of a block with all its experts."""
        params = self.norm_params + sum(linear.params for linear in self.linears_of(block))
        if block.mixture:
            params += self.router_params + self.experts.num_experts * self.expert_params
        return params

    @property
    def table_params(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab_size * self.dim

    @property
    def num_tables(self) -> int:
        """Embedding and head, or the one weight that they share."""
        return 1 if self.tied else 2

    def local_root(self, tp: int, *, first: bool = True, last: bool = True) -> float:
        """Parameters of embedding (first), head and final norm (last) on a tp rank. A tied weight is on both ranks."""
        tables = first or last if self.tied else first + last
        return tables * self.table_params / tp + self.dim * last

    @property
    def num_params(self) -> int:
        """All parameters, a tied weight counted once."""
        return sum(map(self.block_params, self.blocks)) + self.num_tables * self.table_params + self.dim

    @property
    def num_active_params(self) -> int:
        """Parameters that one token meets: ``top_k`` experts of each mixture."""
        mixtures = sum(block.mixture for block in self.blocks)
        if not mixtures:
            return self.num_params
        return self.num_params - mixtures * (self.experts.num_experts - self.experts.top_k) * self.expert_params

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token, see ``training_flops_per_token``."""
        # an untied embedding is a lookup; a tied one is the head's GEMM too
        matmul_params = self.num_active_params - (0 if self.tied else self.table_params)
        return training_flops_per_token(matmul_params, self.num_layers * self.query_dim, seq_len)


def training_flops_per_token(matmul_params: int, attention_width: int, seq_len: int) -> int:
    """FLOPs of forward and backward by the convention of published MFU figures (Chowdhery et al. 2022, appendix B).

    Attention is not halved for causality, and recomputation is not counted. ``matmul_params`` multiply a token;
    ``attention_width`` are the features of all query heads of all layers.
    """
    return 6 * matmul_params + 12 * attention_width * seq_len


# Cached: a plan asks for every block of every pipeline rank, and a search makes thousands of plans.
@functools.cache
def local_block_params(shape: DecoderShape, block: BlockKind, tp: int) -> float:
    """Parameters of a block on a tp rank, without experts. Norms and router are whole on every rank."""
    split = sum(linear.params for linear in shape.linears_of(block))
    return split / tp + shape.norm_params + (shape.router_params if block.mixture else 0)
