"""Names and configuration of ``LlamaForCausalLM`` and ``Qwen3ForCausalLM``.

Weights are the same numbers under other names: the rotary layout here is Hugging Face's, nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from titanyaml.config.schema import Model
from titanyaml.errors import CheckpointError, ConfigError
from titanyaml.models.attention import head_size

_ARCHITECTURES = {"llama3": ("LlamaForCausalLM", "llama"), "qwen3": ("Qwen3ForCausalLM", "qwen3")}
_HEAD = "lm_head.weight"
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_BLOCK_BIAS = {ours.replace("weight", "bias"): theirs.replace("weight", "bias") for ours, theirs in _BLOCK.items()
               if ours.startswith("attention.w")}
_BLOCK_QK_NORM = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}


def name_map(spec: Model) -> dict[str, str]:
    """Our parameter names to Hugging Face's, complete for ``spec``."""
    block = _BLOCK | (_BLOCK_BIAS if spec.attention_bias else {}) | (_BLOCK_QK_NORM if spec.qk_norm else {})
    names = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for i in range(spec.num_layers):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in block.items()}
    names["norm.weight"] = "model.norm.weight"
    if not spec.tie_embeddings:
        names["output.weight"] = _HEAD
    return names


def to_hf(state: dict[str, Tensor], spec: Model) -> dict[str, Tensor]:
    """Our state under Hugging Face's names. The tensors are the same objects; a tied head is left out, as there.

    Raises:
        CheckpointError: a key is missing or unexpected.
    """
    names = name_map(spec)
    _check_keys(state, names, what="state")
    return {theirs: state[ours] for ours, theirs in names.items()}


def from_hf(state: dict[str, Tensor], spec: Model) -> dict[str, Tensor]:
    """A Hugging Face state under our names. The tensors are the same objects.

    A tied model may bring its head under its own name too; it must then equal the embedding.

    Raises:
        CheckpointError: a key is missing or unexpected, or a head that should be tied has values of its own.
    """
    names = {theirs: ours for ours, theirs in name_map(spec).items()}
    if spec.tie_embeddings and _HEAD in state:
        state = dict(state)
        head, embedding = state.pop(_HEAD), state.get("model.embed_tokens.weight")
        if embedding is not None and not (head is embedding or torch.equal(head, embedding)):
            raise CheckpointError(
                f"{_HEAD} differs from the embedding, but the model is tied", key="model.tie_embeddings",
                hint="model.tie_embeddings=false",
            )
    _check_keys(state, names, what="Hugging Face state")
    return {ours: state[theirs] for theirs, ours in names.items()}


def hf_config(spec: Model) -> dict[str, Any]:
    """The content of ``config.json``. Special token ids are null: they are the tokenizer's to say.

    Raises:
        ConfigError: the family's architecture cannot express ``spec``.
    """
    if spec.qk_norm != (spec.family == "qwen3"):
        raise ConfigError(
            f"{spec.qk_norm} cannot be expressed by {_ARCHITECTURES[spec.family][0]}", key="model.qk_norm",
            hint=f"model.family={'qwen3' if spec.qk_norm else 'llama3'}",
        )
    architecture, model_type = _ARCHITECTURES[spec.family]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": head_size(spec),
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "attention_bias": spec.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model_type == "llama":
        config |= {"mlp_bias": False, "pretraining_tp": 1}
    else:
        config |= {"use_sliding_window": False}
    if spec.rope_scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_max_seq_len,
        }
    return config


def _check_keys(got: Iterable[str], wanted: Iterable[str], *, what: str) -> None:
    missing, unexpected = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
    parts = [
        f"{len(keys)} {kind} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected)) if keys
    ]
    if parts:
        raise CheckpointError(
            f"{what}: names do not fit the model: {'; '.join(parts)}", key="model",
            hint="the model option that the weights were made with",
        )
