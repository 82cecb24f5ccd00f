"""Weights from and for Hugging Face checkpoints, as they are published on the hub.

Architectures: ``LlamaForCausalLM``, ``Qwen3ForCausalLM``, ``MixtralForCausalLM``, ``Qwen3MoeForCausalLM`` and
``Llama4ForCausalLM`` (the text model). ``hf_config.py`` writes config.json. Experts are stacked here; Mixtral and
Qwen3-MoE store each by itself, Llama 4 stores gate and up as one tensor, and its rotary embedding rotates neighbouring
channels where ours rotates channels half a head apart. Shapes: E experts, D model width, F inner width, H head size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.schema import Model
from titanyaml.errors import CheckpointError
from titanyaml.models.hf_config import hf_config as hf_config

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class TensorMapping:
    """Tensors of ours, the same values as tensors of a Hugging Face checkpoint, and how each are made of the other.

    Args:
        ours, hf: names.
        export: our tensors, in the order of ``ours``, to those of ``hf``; by default they are the same objects.
        load: the reverse.
    """

    ours: tuple[str, ...]
    hf: tuple[str, ...]
    export: Convert = tuple
    load: Convert = tuple


def same(ours: str, hf: str) -> TensorMapping:
    """One tensor under two names."""
    return TensorMapping((ours,), (hf,))


def stacked_experts(ours: str, hf: str, *, num_experts: int) -> TensorMapping:
    """[E, ...] here, E tensors there; ``hf`` has a ``{}`` for the expert's number."""
    names = tuple(hf.format(i) for i in range(num_experts))
    return TensorMapping((ours,), names, lambda t: t[0].unbind(), lambda t: (torch.stack(tuple(t)),))


def fused_gate_up(gate: str, up: str, hf: str) -> TensorMapping:
    """Gate and up [E, F, D] each here, [E, D, 2F] there."""
    return TensorMapping(
        (gate, up),
        (hf,),
        lambda t: (torch.cat(tuple(t), dim=1).transpose(1, 2).contiguous(),),
        lambda t: tuple(half.contiguous() for half in t[0].transpose(1, 2).chunk(2, dim=1)),
    )


def transposed(ours: str, hf: str) -> TensorMapping:
    """[E, D, F] here, [E, F, D] there."""

    def transpose(tensors: Sequence[Tensor]) -> tuple[Tensor]:
        return (tensors[0].transpose(1, 2).contiguous(),)

    return TensorMapping((ours,), (hf,), transpose, transpose)


def interleaved_rotary(ours: str, hf: str, *, head_dim: int) -> TensorMapping:
    """Output features of a head: channels i and i + H/2 rotate together here, 2i and 2i + 1 there."""

    def permute(weight: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor]:
        return (torch.unflatten(weight, 0, sizes).transpose(1, 2).flatten(0, 2),)

    half = head_dim // 2
    return TensorMapping((ours,), (hf,), lambda t: permute(t[0], (-1, 2, half)), lambda t: permute(t[0], (-1, half, 2)))


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HF_LINEARS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def mappings(spec: Model) -> Iterator[TensorMapping]:
    """Yield the mapping of every parameter of ``spec``, in our order of construction."""
    yield same("tok_embeddings.weight", _EMBEDDING)
    for i, kind in enumerate(DecoderShape.of(spec).blocks):
        ours, hf = f"layers.{i}.", f"model.layers.{i}."
        yield same(f"{ours}attention_norm.weight", f"{hf}input_layernorm.weight")
        yield from _attention(spec, kind.rotary, f"{ours}attention.", f"{hf}self_attn.")
        yield same(f"{ours}ffn_norm.weight", f"{hf}post_attention_layernorm.weight")
        mlp = "feed_forward." if spec.family == "llama4" else "mlp."
        if kind.mixture:
            yield from _mixture(spec, f"{ours}feed_forward.", hf, mlp)
        else:
            yield from _feed_forward(f"{ours}feed_forward.", f"{hf}{mlp}")
    yield same("norm.weight", "model.norm.weight")
    if not spec.tie_embeddings:
        yield same("output.weight", _HEAD)


def _attention(spec: Model, rotary: bool, ours: str, hf: str) -> Iterator[TensorMapping]:
    interleaved = spec.family == "llama4" and rotary
    for leaf in ("weight", "bias") if spec.attention_bias else ("weight",):
        for name in "qkvo":
            names = f"{ours}w{name}.{leaf}", f"{hf}{name}_proj.{leaf}"
            rotates = interleaved and name in "qk"
            yield interleaved_rotary(*names, head_dim=DecoderShape.of(spec).head_dim) if rotates else same(*names)
    if spec.qk_norm:
        yield from (same(f"{ours}{name}_norm.weight", f"{hf}{name}_norm.weight") for name in "qk")


def _feed_forward(ours: str, hf: str) -> Iterator[TensorMapping]:
    for name, hf_name in _HF_LINEARS.items():
        yield same(f"{ours}{name}.weight", f"{hf}{hf_name}.weight")


def _mixture(spec: Model, ours: str, block: str, mlp: str) -> Iterator[TensorMapping]:
    """Router, experts and shared expert of the block whose names begin with ``block``; ``mlp`` names the mixture."""
    experts = f"{ours}experts."
    if spec.family == "llama4":
        yield same(f"{ours}router.weight", f"{block}{mlp}router.weight")
        yield fused_gate_up(f"{experts}w1", f"{experts}w3", f"{block}{mlp}experts.gate_up_proj")
        yield transposed(f"{experts}w2", f"{block}{mlp}experts.down_proj")
        yield from _feed_forward(f"{ours}shared.", f"{block}{mlp}shared_expert.")
        return
    mixtral = spec.family == "mixtral"  # its experts have our names: w1, w2, w3
    prefix = f"{block}block_sparse_moe." if mixtral else f"{block}{mlp}"
    yield same(f"{ours}router.weight", f"{prefix}gate.weight")
    for name, hf_name in _HF_LINEARS.items():
        leaf = f"{name if mixtral else hf_name}.weight"
        yield stacked_experts(f"{experts}{name}", f"{prefix}experts.{{}}.{leaf}", num_experts=spec.moe.num_experts)


def to_hf(state: dict[str, Tensor], spec: Model) -> dict[str, Tensor]:
    """Our state under Hugging Face's names. Tensors of equal layout are the same objects; a tied head is left out.

    Raises:
        CheckpointError: a key is missing or unexpected.
    """
    _check_keys(state, [name for mapping in mappings(spec) for name in mapping.ours], what="state")
    hf_state: dict[str, Tensor] = {}
    for mapping in mappings(spec):
        hf_state |= zip(mapping.hf, mapping.export([state[name] for name in mapping.ours]), strict=True)
    return hf_state


def from_hf(state: dict[str, Tensor], spec: Model) -> dict[str, Tensor]:
    """A Hugging Face state under our names. Tensors of equal layout are the same objects.

    Raises:
        CheckpointError: a key is missing or unexpected, or the head of a tied model differs from the embedding.
    """
    if spec.tie_embeddings and _HEAD in state:
        state = dict(state)  # some files hold the tied weight under both names
        head, embedding = state.pop(_HEAD), state.get(_EMBEDDING)
        if embedding is not None and not (head is embedding or torch.equal(head, embedding)):
            raise CheckpointError(
                f"{_HEAD} differs from the embedding, but the model is tied",
                key="model.tie_embeddings",
                hint="model.tie_embeddings=false",
            )
    _check_keys(state, [name for mapping in mappings(spec) for name in mapping.hf], what="Hugging Face state")
    our_state: dict[str, Tensor] = {}
    for mapping in mappings(spec):
        our_state |= zip(mapping.ours, mapping.load([state[name] for name in mapping.hf]), strict=True)
    return our_state


def _check_keys(actual: Iterable[str], expected: Iterable[str], *, what: str) -> None:
    missing, unexpected = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
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
