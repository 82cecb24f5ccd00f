"""The ``config.json`` of a Hugging Face checkpoint, and which models each architecture can express."""

from collections.abc import Callable
from typing import Any

from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.schema import Model
from titanyaml.errors import ConfigError, Problem

ARCHITECTURES = {
    "llama3": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "llama4": ("Llama4ForCausalLM", "llama4_text"),
}
#: Keys that have a single value in an architecture. Those of ``_DEFAULTS`` are fixed to it in all others.
_FIXED: dict[str, dict[str, Any]] = {
    "llama3": {"moe.num_experts": 0},
    "qwen3": {"moe.num_experts": 0, "qk_norm": True},
    "mixtral": {"moe.score": "softmax", "moe.normalize": True, "moe.first_dense": 0, "moe.every": 1}
    | {"moe.ffn_dim": None, "moe.shared_ffn_dim": 0, "moe.weight_at": "output", "attention_bias": False},
    "qwen3_moe": {"moe.score": "softmax", "moe.shared_ffn_dim": 0, "moe.weight_at": "output", "qk_norm": True},
    "llama4": {"moe.score": "sigmoid", "moe.normalize": False, "moe.first_dense": 0, "moe.weight_at": "input"},
}
_LLAMA4_DEFAULTS = {"qk_l2_norm": False, "nope_every": 0, "attention_chunk": None, "attention_temperature": 0.0}
_DEFAULTS = {"qk_norm": False, **_LLAMA4_DEFAULTS}
_MOE_DEFAULTS = {"moe.scale": 1.0, "moe.num_groups": 1, "moe.bias_rate": 0.0}


def hf_config(spec: Model) -> dict[str, Any]:
    """The content of ``config.json``; ConfigError if the architecture cannot express ``spec``.
    Special token ids are null: only a tokenizer has them.
    """
    if problems := _inexpressible(spec):
        raise ConfigError(problems)
    architecture, model_type = ARCHITECTURES[spec.family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": DecoderShape.of(spec).head_dim,
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
    if scaling := spec.rope_scaling:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return config | _FAMILY_KEYS[spec.family](spec)


def _mixtral(spec: Model) -> dict[str, Any]:
    return {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.top_k, "sliding_window": None}


def _qwen3_moe(spec: Model) -> dict[str, Any]:
    moe = spec.moe
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize,
        "moe_intermediate_size": moe.ffn_dim or spec.ffn_dim,
        "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(range(moe.first_dense)),
        "use_sliding_window": False,
    }


def _llama4(spec: Model) -> dict[str, Any]:
    moe, kinds = spec.moe, DecoderShape.of(spec).blocks
    return {
        "intermediate_size": moe.ffn_dim or spec.ffn_dim,
        "intermediate_size_mlp": spec.ffn_dim,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "interleave_moe_layer_step": moe.every,
        "moe_layers": [i for i, kind in enumerate(kinds) if kind.mixture],
        "no_rope_layers": [int(kind.rotary) for kind in kinds],
        "attention_chunk_size": spec.attention_chunk,
        "use_qk_norm": spec.qk_l2_norm,
        "attn_temperature_tuning": spec.attention_temperature > 0,
        "attn_scale": spec.attention_temperature,
        "floor_scale": spec.attention_temperature_floor,
    }


_FAMILY_KEYS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "llama3": lambda spec: {"mlp_bias": False, "pretraining_tp": 1},
    "qwen3": lambda spec: {"use_sliding_window": False},
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "llama4": _llama4,
}


def _inexpressible(spec: Model) -> list[Problem]:
    """Keys of ``spec`` whose values the family's architecture does not have."""
    required: dict[str, Any] = _DEFAULTS | _FIXED[spec.family]
    if spec.family == "llama4":
        required = {name: value for name, value in required.items() if name not in _LLAMA4_DEFAULTS}
        required["moe.shared_ffn_dim"] = spec.moe.ffn_dim or spec.ffn_dim
    if spec.moe.ffn_dim == spec.ffn_dim:
        required.pop("moe.ffn_dim", None)  # the same width as the default, only typed
    if "moe.num_experts" not in required:
        required |= _MOE_DEFAULTS
        if not spec.moe.num_experts:
            return [_problem("moe.num_experts", 0, "1 or more", spec)]
    actual = {name: getattr(spec.moe if "." in name else spec, name.removeprefix("moe.")) for name in required}
    return [_problem(name, actual[name], value, spec) for name, value in required.items() if actual[name] != value]


def _problem(name: str, actual: Any, required: Any, spec: Model) -> Problem:
    families = {"qwen3": "llama3", "llama3": "qwen3"} if name == "qk_norm" else {}
    hint = f"model.family={families[spec.family]}" if spec.family in families else "another model.family"
    message = f"{actual} cannot be expressed by {ARCHITECTURES[spec.family][0]}"
    return Problem(f"model.{name}", message, allowed=str(required), hint=hint)
