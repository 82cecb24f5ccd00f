"""Tiny models of every variant, with weights that make each part matter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from titanyaml.config.schema import Model, MoE, RopeScaling
from titanyaml.models import decoder
from titanyaml.models.decoder import Decoder
from titanyaml.models.init import materialise

VOCAB = 101
BASE = Model(
    name="tiny",
    vocab_size=VOCAB,
    dim=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    ffn_dim=80,
    max_seq_len=64,
    init_std=0.2,
)
# 64 positions over an original context of 16: some frequencies are kept, some stretched, some in between
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
SPECS = {
    "llama3_1": replace(BASE, rope_theta=100.0, rope_scaling=SCALED),
    "llama3_2_tied": replace(BASE, rope_theta=100.0, rope_scaling=SCALED, tie_embeddings=True),
    "llama_bias": replace(BASE, num_kv_heads=6, attention_bias=True),
    "qwen3": replace(BASE, family="qwen3", qk_norm=True, head_dim=16, rope_theta=1e6, norm_eps=1e-6),
    "qwen3_tied": replace(BASE, family="qwen3", qk_norm=True, head_dim=4, tie_embeddings=True, attention_bias=True),
}
MIXTURES = {
    "mixtral": replace(BASE, family="mixtral", moe=MoE(num_experts=5, top_k=2, normalize=True)),
    "qwen3_moe": replace(
        BASE,
        family="qwen3_moe",
        qk_norm=True,
        head_dim=16,
        num_layers=4,
        moe=MoE(num_experts=6, top_k=3, ffn_dim=24, normalize=True, first_dense=1, every=2),
    ),
    # chunks of 16 in 64 positions; blocks 1 and 3 are mixtures, block 2 has no rotary embedding
    "llama4": replace(
        BASE,
        family="llama4",
        num_layers=3,
        rope_theta=100.0,
        rope_scaling=RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=16),
        qk_l2_norm=True,
        nope_every=2,
        attention_chunk=16,
        attention_temperature=0.3,
        attention_temperature_floor=10,
        moe=MoE(num_experts=4, top_k=1, ffn_dim=24, shared_ffn_dim=24, score="sigmoid", weight_at="input"),
    ),
    "llama4_interleaved": replace(
        BASE,
        family="llama4",
        num_layers=4,
        nope_every=4,
        attention_chunk=64,
        moe=MoE(num_experts=4, top_k=2, ffn_dim=24, shared_ffn_dim=24, score="sigmoid", weight_at="input", every=2),
    ),
}


def build(spec: Model, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """Materialised on the CPU; norm weights and biases are moved off their initial ones and zeros."""
    model = decoder.build(spec).to(dtype)
    materialise(model, device=torch.device("cpu"), seed=seed, param_dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return (torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted)).item()
