"""Facts that a model states about itself, so that plugins and the planner need not look inside it."""

from dataclasses import dataclass

from titanyaml.config.decoder_shape import training_flops_per_token


@dataclass(frozen=True)
class BlockLayout:
    """Roles of a block's modules, by name within the block, for tensor, context and expert parallelism.

    Args:
        entries: modules that take the normalised residual stream and return what is added to it.
        attention: the module whose ``attend`` mixes positions.
        column: linear layers at the entries' inputs, sharded by output feature (attention: by head).
        row: linear layers at the entries' outputs, sharded by input feature; a rank's output is a summand.
        stream_norms: norms over the residual stream.
        head_norms: norms of single heads.
        router, experts: of a mixture, else "". Both work token by token.
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
        blocks: qualified names of the repeated blocks in order ("layers.0", ...); of a part only its own.
        embedding, head, final_norm: qualified names of these modules, "" where a part lacks them; ``head`` equals
            ``embedding`` where tied.
        num_params: parameters of the model, a tied weight counted once; num_active_params: those one token meets.
        num_experts: of a mixture block; 0 where there is none.
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
        """Training FLOPs per token, see ``training_flops_per_token``."""
        # an embedding is a lookup; a tied one is also the head's GEMM, so that nothing is subtracted
        matmul_params = self.num_active_params - (0 if self.tied else self.num_embedding_params)
        return training_flops_per_token(matmul_params, self.num_layers * self.num_heads * self.head_dim, seq_len)
