"""The decoder's keys. Part of ``config/schema.py``, which is where others import them from."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.config.keys import MISSING, key


@dataclass
class RopeScaling:
    """Llama 3.1 frequency scaling."""

    factor: float = key(8.0, "how far low frequencies are stretched", above=0)
    low_freq_factor: float = key(1.0, "wavelengths above original/low are fully stretched", above=0)
    high_freq_factor: float = key(4.0, "wavelengths below original/high are kept", above=0)
    original_max_seq_len: int = key(8192, "context length of the unscaled model (tokens)", low=1)


@dataclass
class Model:
    """Sizes and variants of the one decoder."""

    name: str = key(MISSING, "name of the architecture")
    family: str = key("llama3", "naming and layout for Hugging Face import and export", choices=["llama3", "qwen3"])
    vocab_size: int = key(MISSING, "rows of the embedding (tokens)", low=1)
    dim: int = key(MISSING, "width of the residual stream", low=1)
    num_layers: int = key(MISSING, "decoder blocks", low=1)
    num_heads: int = key(MISSING, "query heads", low=1)
    num_kv_heads: int = key(MISSING, "key/value heads; must divide num_heads", low=1)
    head_dim: int | None = key(None, "width of a head; null: dim / num_heads", low=2)
    ffn_dim: int = key(MISSING, "inner width of the SwiGLU feed-forward", low=1)
    max_seq_len: int = key(MISSING, "longest sequence the model accepts (tokens)", low=1)
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", above=0)
    rope_theta: float = key(500000.0, "base of the rotary frequencies", above=0)
    rope_scaling: RopeScaling | None = key(None, "Llama 3.1 frequency scaling; null: none")
    tie_embeddings: bool = key(False, "the output projection is the embedding's weight")
    qk_norm: bool = key(False, "RMSNorm on each query and key head (Qwen3)")
    attention_bias: bool = key(False, "bias on the four attention projections")
    document_mask: bool = key(False, "tokens attend only within their own document (block-causal)")
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
