"""Names of Hugging Face checkpoints: ``LlamaForCausalLM``, ``Qwen3ForCausalLM``, ``MixtralForCausalLM``,
``Qwen3MoeForCausalLM`` and ``Llama4ForCausalLM`` (the text model), as they are published on the hub.

What ``config.json`` says: ``hf_config.py``. Layouts that differ: ``hf_layout.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from titanyaml.config.schema import Model
from titanyaml.errors import CheckpointError
from titanyaml.models.attention import head_size, is_rotary
from titanyaml.models.hf_config import hf_config as hf_config
from titanyaml.models.hf_layout import Piece, fused_gate_up, neighbours, one_by_one, same, transposed
from titanyaml.models.moe import is_mixture

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def pieces(spec: Model) -> list[Piece]:
    """Every parameter of ``spec``, in our order of construction."""
    found = [same("tok_embeddings.weight", _EMBEDDING)]
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        found.append(same(f"{ours}attention_norm.weight", f"{theirs}input_layernorm.weight"))
        found += _attention(spec, i, f"{ours}attention.", f"{theirs}self_attn.")
        found.append(same(f"{ours}ffn_norm.weight", f"{theirs}post_attention_layernorm.weight"))
        mlp = "feed_forward." if spec.family == "llama4" else "mlp."
        if is_mixture(spec, i):
            found += _mixture(spec, f"{ours}feed_forward.", theirs, mlp)
        else:
            found += _feed_forward(f"{ours}feed_forward.", f"{theirs}{mlp}")
    found.append(same("norm.weight", "model.norm.weight"))
    if not spec.tie_embeddings:
        found.append(same("output.weight", _HEAD))
    return found


def _attention(spec: Model, index: int, ours: str, theirs: str) -> Iterator[Piece]:
    turned = spec.family == "llama4" and is_rotary(spec, index)
    for leaf in ("weight", "bias") if spec.attention_bias else ("weight",):
        for name in "qkvo":
            names = f"{ours}w{name}.{leaf}", f"{theirs}{name}_proj.{leaf}"
            yield neighbours(*names, head_dim=head_size(spec)) if turned and name in "qk" else same(*names)
    if spec.qk_norm:
        yield from (same(f"{ours}{name}_norm.weight", f"{theirs}{name}_norm.weight") for name in "qk")


def _feed_forward(ours: str, theirs: str) -> Iterator[Piece]:
    for name, other in _FEED_FORWARD.items():
        yield same(f"{ours}{name}.weight", f"{theirs}{other}.weight")


def _mixture(spec: Model, ours: str, block: str, mlp: str) -> Iterator[Piece]:
    """Router, experts and shared expert of the block whose names begin with ``block``; ``mlp`` names the mixture."""
    experts = f"{ours}experts."
    count = spec.moe.num_experts
    if spec.family == "llama4":
        yield same(f"{ours}router.weight", f"{block}{mlp}router.weight")
        yield fused_gate_up(f"{experts}w1", f"{experts}w3", f"{block}{mlp}experts.gate_up_proj")
        yield transposed(f"{experts}w2", f"{block}{mlp}experts.down_proj")
        yield from _feed_forward(f"{ours}shared.", f"{block}{mlp}shared_expert.")
        return
    mixtral = spec.family == "mixtral"
    home = f"{block}block_sparse_moe." if mixtral else f"{block}{mlp}"
    yield same(f"{ours}router.weight", f"{home}gate.weight")
    for name, other in _FEED_FORWARD.items():
        leaf = f"{name if mixtral else other}.weight"
        yield one_by_one(f"{experts}{name}", f"{home}experts.{{}}.{leaf}", num_experts=count)


def name_map(spec: Model) -> dict[str, str]:
    """Our parameter names to Hugging Face's, of those that are one tensor in one layout on both sides."""
    return {piece.ours[0]: piece.theirs[0] for piece in pieces(spec) if piece.export is tuple}


def to_hf(state: dict[str, Tensor], spec: Model) -> dict[str, Tensor]:
    """Our state under Hugging Face's names. Tensors whose layout is the same are the same objects; a tied head is left
    out, as there.

    Raises:
        CheckpointError: a key is missing or unexpected.
    """
    parts = pieces(spec)
    _check_keys(state, [name for piece in parts for name in piece.ours], what="state")
    return {
        name: tensor
        for piece in parts
        for name, tensor in zip(piece.theirs, piece.export([state[n] for n in piece.ours]), strict=True)
    }


def from_hf(state: dict[str, Tensor], spec: Model) -> dict[str, Tensor]:
    """A Hugging Face state under our names. Tensors whose layout is the same are the same objects.

    A tied model may bring its head under its own name too; it must then equal the embedding.

    Raises:
        CheckpointError: a key is missing or unexpected, or a head that should be tied has values of its own.
    """
    if spec.tie_embeddings and _HEAD in state:
        state = dict(state)
        head, embedding = state.pop(_HEAD), state.get(_EMBEDDING)
        if embedding is not None and not (head is embedding or torch.equal(head, embedding)):
            raise CheckpointError(
                f"{_HEAD} differs from the embedding, but the model is tied",
                key="model.tie_embeddings",
                hint="model.tie_embeddings=false",
            )
    parts = pieces(spec)
    _check_keys(state, [name for piece in parts for name in piece.theirs], what="Hugging Face state")
    return {
        name: tensor
        for piece in parts
        for name, tensor in zip(piece.ours, piece.load([state[n] for n in piece.theirs]), strict=True)
    }


def _check_keys(got: Iterable[str], wanted: Iterable[str], *, what: str) -> None:
    missing, unexpected = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
    parts = [
        f"{len(keys)} {kind} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if parts:
        raise CheckpointError(
            f"{what}: names do not fit the model: {'; '.join(parts)}",
            key="model",
            hint="the model option that the weights were made with",
        )
