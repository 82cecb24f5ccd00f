"""What a model says of itself, so that plugins and the planner need not look inside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockLayout:
    """How a block's matrices follow on each other: what tensor parallelism has to know. Names within a block.

    Args:
        entries: modules that take the normalised residual stream and return what is added to it.
        attention: the module whose ``attend`` looks at other positions.
        column: linear layers of the entries' inputs, split by output feature (attention: by head).
        row: linear layers of the entries' outputs, split by input feature; their outputs are summands.
        stream_norms: norms over the residual stream. head_norms: norms of single heads.
        router, experts: of a mixture, else "": the one that chooses, and the stacked experts. Both work token by token.
    """

    entries: tuple[str, ...]
    attention: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    stream_norms: tuple[str, ...]
    head_norms: tuple[str, ...] = ()
    router: str = ""
    experts: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one decoder.

    Args:
        blocks: qualified names of the repeated blocks in order ("layers.0", ...).
        embedding, head, final_norm: qualified names of these modules; ``head`` equals ``embedding`` where tied. In the
            facts of a part of a model: "" for what it lacks, and ``blocks`` are its own.
        num_params: logical parameters, a tied weight counted once. num_active_params: those that a token meets.
        num_embedding_params: parameters of the input embedding (not in the FLOPs of a token).
        num_layers, num_heads, num_kv_heads, head_dim, dim, ffn_dim, vocab_size, max_seq_len: sizes.
        tied: whether head and embedding share their weight.
        layouts: of each block. num_experts: of a mixture block; 0 where there is none.
    """

    blocks: tuple[str, ...]
    embedding: str
    head: str
    final_norm: str
    num_params: int
    num_active_params: int
    num_embedding_params: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    tied: bool
    layouts: tuple[BlockLayout, ...]
    num_experts: int = 0

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token: 6*(active parameters - input embedding) + 12*layers*heads*head_dim*seq.

        The convention of the published MFU figures: forward and backward, attention not halved for causality,
        recomputation not counted. With tied embeddings the head's matrix product remains, so nothing is subtracted.
        """
        matmul_params = self.num_active_params - (0 if self.tied else self.num_embedding_params)
        return 6 * matmul_params + 12 * self.num_layers * self.num_heads * self.head_dim * seq_len
