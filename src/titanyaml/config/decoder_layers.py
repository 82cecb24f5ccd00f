"""Names of the decoder's modules, without building it, and which of its linear layers are converted to float8."""

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from titanyaml.config.decoder_shape import DecoderShape, LinearShape
from titanyaml.config.rules.view import problem
from titanyaml.config.scalar_types import spell
from titanyaml.errors import Problem

#: Both dimensions of a weight are multiples of this: 16 for the float8 GEMM of cuBLAS and CUTLASS, 32 for mxfp8, which
#: has one scale per 32 numbers.
ALIGNMENT = {"float8_tensorwise": 16, "float8_rowwise": 16, "float8_rowwise_with_gw_hp": 16, "mxfp8": 32}


def linear_layers(model: Any) -> dict[str, LinearShape]:
    """The linear layers of all blocks by name. Experts, router, embedding and head are none.

    Args:
        model: a ``schema.Model``, or a rule's view of one.
    """
    shape = DecoderShape.of(model)
    layers = {}
    for index, block in enumerate(shape.blocks):
        for linear in shape.attention_linears:
            layers[f"layers.{index}.attention.{linear.name}"] = linear
        feed_forward = "feed_forward.shared" if block.mixture else "feed_forward"
        for linear in shape.ffn_linears(shape.width(block)):
            layers[f"layers.{index}.{feed_forward}.{linear.name}"] = linear
    return layers


def module_names(model: Any) -> set[str]:
    """The names of all modules of the decoder, without the decoder's own."""
    names = {*linear_layers(model), "layers", "norm", "tok_embeddings"}
    if not model.tie_embeddings:
        names.add("output")
    for index, block in enumerate(DecoderShape.of(model).blocks):
        inner = ["attention_norm", "attention", "ffn_norm", "feed_forward"]
        if model.qk_norm:
            inner += ["attention.q_norm", "attention.k_norm"]
        if block.mixture:
            inner += ["feed_forward.router", "feed_forward.experts"]
        if block.mixture and model.moe.shared_ffn_dim:
            inner.append("feed_forward.shared")
        names |= {f"layers.{index}", *(f"layers.{index}.{name}" for name in inner)}
    return names


def check_filters(filters: Sequence[str], names: Collection[str], *, example: str) -> Problem | None:
    """The problem of ``quant.filter_fqns`` with an entry that is part of no module's name.

    Args:
        names: of modules. example: name of a linear layer.
    """
    key, allowed = "quant.filter_fqns", f"parts of names such as {example}"
    if "" in filters:
        remaining = spell([part for part in filters if part])
        return problem(key, "has an empty text, which names no layer", allowed, f"'{key}={remaining}'")
    absent = next((part for part in filters if not any(part in name for name in names)), None)
    if absent is None:
        return None
    last_parts = sorted({name.rpartition(".")[2] for name in names})
    [similar] = difflib.get_close_matches(absent, last_parts, n=1, cutoff=0)
    corrected = spell([similar if part == absent else part for part in filters])
    return problem(key, f"has {absent!r}, which is in no module's name", allowed, f"'{key}={corrected}'")


def reason_for_high_precision(quant: Any, name: str, n: int, k: int, *, tp: int = 1) -> str:
    """Why a layer stays in high precision; "" if it is converted.

    Args:
        quant: has the recipe and the filters (``schema.Quant``, a view of it, or the plugin).
        n, k: output and input features on each of ``tp`` ranks: what a rank multiplies decides.
    """
    if part := next((part for part in quant.filter_fqns if part in name), ""):
        return f"quant.filter_fqns has {part!r}"
    shards = f" on each of {tp} tp ranks" if tp > 1 else ""
    unit = ALIGNMENT[quant.recipe]
    if n % unit or k % unit:
        return f"{n} x {k}{shards}: not both are multiples of {unit}"
    if quant.auto_filter_small_kn and _is_small(quant.recipe, n, k):
        return f"{n} x {k}{shards}: quant.auto_filter_small_kn finds it too small to gain"
    return ""


def _is_small(recipe: str, n: int, k: int) -> bool:
    """Whether casts are likely to cost what the float8 GEMM gains."""
    # torchao's measurements on H100 (torchao/float8/float8_linear_utils.py), by recipe
    if recipe == "float8_tensorwise":
        return n <= 1024 and k <= 4096
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
