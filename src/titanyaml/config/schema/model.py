"""The decoder's keys. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.config.keys import MISSING, key

FAMILIES = ["llama3", "qwen3", "mixtral", "qwen3_moe", "llama4"]


@dataclass
class RopeScaling:
    """Llama 3.1 frequency scaling."""

    factor: float = key(8.0, "how far low frequencies are stretched", above=0)
    low_freq_factor: float = key(1.0, "wavelengths above original/low are fully stretched", above=0)
    high_freq_factor: float = key(4.0, "wavelengths below original/high are kept", above=0)
    original_max_seq_len: int = key(8192, "context length of the unscaled model (tokens)", low=1)


@dataclass
class MoE:
    """Mixture-of-experts blocks: a router sends each token to a few of many feed-forwards."""

    # 0: a dense model; then nothing reads the other keys (rules/moe.py)
    num_experts: int = key(0, "experts of a block; 0: every block has one plain feed-forward", low=0)
    top_k: int = key(2, "experts that a token is sent to", low=1)
    ffn_dim: int | None = key(None, "inner width of an expert; null: model.ffn_dim", low=1)
    shared_ffn_dim: int = key(0, "inner width of the expert that every token passes; 0: none", low=0)
    first_dense: int = key(0, "leading blocks that stay dense", low=0)
    every: int = key(1, "one block in this many is a mixture, the last of each; 1: all", low=1)
    score: str = key("softmax", "what the router makes of its logits", choices=["softmax", "sigmoid"])
    normalize: bool = key(False, "the weights of the chosen experts are divided by their sum")
    scale: float = key(1.0, "factor on those weights", above=0)
    weight_at: str = key(
        "output", "a token's weight multiplies an expert's output, or its input (Llama 4)", choices=["output", "input"]
    )
    num_groups: int = key(1, "groups of experts, of which a token may use some (DeepSeek-V3); 1: no groups", low=1)
    top_groups: int = key(1, "groups that a token may use", low=1)
    bias_rate: float = key(
        0.0, "step of the bias that evens out loads without a loss (DeepSeek-V3: 0.001); 0: no bias", low=0
    )
    balance_loss: float = key(0.0, "factor of the load-balance loss of each sequence; 0: off", low=0)


@dataclass
class Model:
    """Sizes and variants of the one decoder."""

    name: str = key(MISSING, "name of the architecture")
    family: str = key("llama3", "naming and layout for Hugging Face import and export", choices=FAMILIES)
    vocab_size: int = key(MISSING, "rows of the embedding (tokens)", low=1)
    dim: int = key(MISSING, "width of the residual stream", low=1)
    num_layers: int = key(MISSING, "decoder blocks", low=1)
    num_heads: int = key(MISSING, "query heads", low=1)
    num_kv_heads: int = key(MISSING, "key/value heads; must divide num_heads", low=1)
    # given where heads are wider than dim / num_heads (Qwen3)
    head_dim: int | None = key(None, "width of a head; null: dim / num_heads", low=2)
    ffn_dim: int = key(MISSING, "inner width of the SwiGLU feed-forward", low=1)
    moe: MoE = key(MoE, "mixture of experts in place of feed-forwards")
    max_seq_len: int = key(MISSING, "longest sequence the model accepts (tokens)", low=1)
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", above=0)
    rope_theta: float = key(500000.0, "base of the rotary frequencies", above=0)
    rope_scaling: RopeScaling | None = key(None, "Llama 3.1 frequency scaling; null: none")
    tie_embeddings: bool = key(False, "the output projection is the embedding's weight")
    qk_norm: bool = key(False, "RMSNorm on each query and key head (Qwen3)")
    qk_l2_norm: bool = key(False, "turned query and key heads are divided by their root mean square (Llama 4)")
    nope_every: int = key(
        0, "one block in this many, the last of each, has no rotary embedding (Llama 4: 4); 0: all have one", low=0
    )
    attention_chunk: int | None = key(
        None, "rotary blocks attend within chunks of this many tokens (Llama 4: 8192); null: to the whole past", low=1
    )
    attention_temperature: float = key(
        0.0,
        "t: without rotary embedding, queries times 1 + t*log(1 + floor((position + 1) / floor)) (Llama 4: 0.1)",
        low=0,
    )
    attention_temperature_floor: int = key(8192, "the floor in that formula (tokens)", low=1)
    attention_bias: bool = key(False, "bias on the four attention projections")
    document_mask: bool = key(False, "tokens attend only within their own document (block-causal)")
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
