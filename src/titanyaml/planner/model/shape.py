"""A decoder's sizes: its blocks, their matrices, parameters and FLOPs. No torch here."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """One matrix of a block.

    Args:
        name: within the block. inputs, outputs: features. column: split by output under tensor parallelism, else by
            input. reads: name of the tensor it multiplies; matrices that read the same one share its cast.
    """

    name: str
    inputs: int
    outputs: int
    column: bool
    reads: str


@dataclass(frozen=True)
class Mixture:
    """Blocks whose feed-forward is a router and many experts.

    Args:
        num_experts, top_k: of a block, and of a token. ffn_dim: inner width of an expert. shared_ffn_dim: of the one
            that every token passes; 0: none. first_dense, every: which blocks are mixtures (``models.moe.is_mixture``).
        balanced_by_loss: tp ranks exchange what a balance loss needs.
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    shared_ffn_dim: int = 0
    first_dense: int = 0
    every: int = 1
    balanced_by_loss: bool = False


@dataclass(frozen=True)
class Block:
    """What tells the blocks of a decoder apart. mixture: its feed-forward is one. rotary: queries and keys are turned.
    chunk: tokens within which it attends; None: all."""

    mixture: bool = False
    rotary: bool = True
    chunk: int | None = None


@dataclass(frozen=True)
class Shape:
    """A decoder.

    gated: three matrices in the feed-forward (SwiGLU), else two. rotary: queries and keys are
    turned, but in every ``nope_every``-th block. head_norms: each head of them has a norm. attention_chunk: blocks that
    turn attend within so many tokens. mixture: None for a dense one. Biases are ignored."""

    name: str
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    tied: bool = False
    gated: bool = True
    rotary: bool = True
    head_norms: bool = False
    mixture: Mixture | None = None
    nope_every: int = 0
    attention_chunk: int | None = None

    @property
    def query_dim(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Features of all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What each block is."""
        mixture = self.mixture or Mixture(0, 0, 0, first_dense=self.num_layers)
        turned = [
            self.rotary and not (self.nope_every and (i + 1) % self.nope_every == 0) for i in range(self.num_layers)
        ]
        return tuple(
            Block(
                i >= mixture.first_dense and (i + 1) % mixture.every == 0,
                turns,
                self.attention_chunk if turns else None,
            )
            for i, turns in enumerate(turned)
        )

    @property
    def attention_linears(self) -> tuple[Linear, ...]:
        """The matrices of attention in the order in which a forward pass multiplies by them."""
        d, q, k = self.dim, self.query_dim, self.kv_dim
        return (
            Linear("wq", d, q, True, "attention_in"),
            Linear("wk", d, k, True, "attention_in"),
            Linear("wv", d, k, True, "attention_in"),
            Linear("wo", q, d, False, "attended"),
        )

    def ffn_linears(self, width: int) -> tuple[Linear, ...]:
        """Those of a feed-forward of this inner width, 0: none."""
        if not width:
            return ()
        gate = [Linear("w1", self.dim, width, True, "ffn_in")] if self.gated else []
        return (*gate, Linear("w3", self.dim, width, True, "ffn_in"), Linear("w2", width, self.dim, False, "product"))

    def width(self, block: Block) -> int:
        """Inner width of what every token passes in a block: the feed-forward, or the shared expert; 0: nothing."""
        return self.mixture.shared_ffn_dim if block.mixture else self.ffn_dim

    def linears_of(self, block: Block) -> tuple[Linear, ...]:
        """Matrices that every token meets, but the router's."""
        return (*self.attention_linears, *self.ffn_linears(self.width(block)))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those of all blocks, one of each name."""
        return tuple({one.name: one for block in self.blocks for one in self.linears_of(block)}.values())

    @property
    def norm_params(self) -> int:
        """Of a block."""
        return 2 * self.dim + (2 * self.head_dim if self.head_norms else 0)

    @property
    def router_params(self) -> int:
        """Of a mixture."""
        return self.mixture.num_experts * self.dim

    @property
    def expert_params(self) -> int:
        """Of one expert."""
        return 3 * self.dim * self.mixture.ffn_dim

    def block_params(self, block: Block) -> int:
        """Of a block, all its experts counted."""
        whole = self.norm_params
        if block.mixture:
            whole += self.router_params + self.mixture.num_experts * self.expert_params
        return whole + sum(one.inputs * one.outputs for one in self.linears_of(block))

    @property
    def root_params(self) -> int:
        """Embedding, head and final norm."""
        return self.vocab_size * self.dim * (1 if self.tied else 2) + self.dim

    def local_block(self, block: Block, tp: int) -> float:
        """Parameters of a block on a tp rank, without experts: norms and router are whole everywhere."""
        return _local_block(self, block, tp)

    def local_root(self, tp: int, *, first: bool = True, last: bool = True) -> float:
        """Parameters of embedding (first), head and final norm (last) on a tp rank; a tied weight is on both."""
        tables = first or last if self.tied else first + last
        return tables * self.vocab_size * self.dim / tp + self.dim * last

    @property
    def num_params(self) -> int:
        """All, a tied weight counted once."""
        return sum(map(self.block_params, self.blocks)) + self.root_params

    @property
    def num_active_params(self) -> int:
        """Those that a token meets."""
        idle = 0
        if self.mixture is not None:
            mixtures = sum(block.mixture for block in self.blocks)
            idle = mixtures * (self.mixture.num_experts - self.mixture.top_k) * self.expert_params
        return self.num_params - idle

    def flops_per_token(self, seq_len: int) -> int:
        """As ``models.protocol.ModelFacts.flops_per_token``: the convention of MFU."""
        embedding = 0 if self.tied else self.vocab_size * self.dim
        return 6 * (self.num_active_params - embedding) + 12 * self.num_layers * self.query_dim * seq_len


@functools.cache
def _local_block(shape: Shape, block: Block, tp: int) -> float:
    """Kept: a plan asks for every block of every pipeline rank, and a search plans thousands."""
    split = sum(one.inputs * one.outputs for one in shape.linears_of(block))
    return split / tp + shape.norm_params + (shape.router_params if block.mixture else 0)
