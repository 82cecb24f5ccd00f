"""Names and shapes of the decoder's modules, without building it, and which of its layers float8 is for."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from titanyaml.config.scalar_types import spell
from titanyaml.errors import Problem

#: Sides of a product are multiples of this: what the float8 GEMM takes; mxfp8 has one scale per 32 numbers.
ALIGNMENT = {"float8_tensorwise": 16, "float8_rowwise": 16, "float8_rowwise_with_gw_hp": 16, "mxfp8": 32}


class Layer(NamedTuple):
    """A linear layer: its name, the sides of its weight [n, k], and which of them tp ranks divide."""

    name: str
    n: int
    k: int
    split: str

    def on_each(self, tp: int) -> tuple[int, int]:
        """(n, k) of the weight that one of ``tp`` ranks multiplies with."""
        return (self.n // tp, self.k) if self.split == "n" else (self.n, self.k // tp)


def linear_layers(model: Any) -> list[Layer]:
    """The linear layers of the blocks, of the model's sizes (``schema.Model``, or a view of it); experts are none."""
    width = model.head_dim or model.dim // model.num_heads
    queries, keys = model.num_heads * width, model.num_kv_heads * width
    found = []
    for index in range(model.num_layers):
        attention, ffn = f"layers.{index}.attention", f"layers.{index}.feed_forward"
        found += [
            Layer(f"{attention}.wq", queries, model.dim, "n"),
            Layer(f"{attention}.wk", keys, model.dim, "n"),
            Layer(f"{attention}.wv", keys, model.dim, "n"),
            Layer(f"{attention}.wo", model.dim, queries, "k"),
        ]
        inner = model.ffn_dim
        if _is_mixture(model, index):
            ffn, inner = f"{ffn}.shared", model.moe.shared_ffn_dim
        if inner:
            found += [Layer(f"{ffn}.{name}", inner, model.dim, "n") for name in ("w1", "w3")]
            found.append(Layer(f"{ffn}.w2", model.dim, inner, "k"))
    return found


def module_names(model: Any) -> set[str]:
    """The names of all modules of the decoder but the root's."""
    names = {layer.name for layer in linear_layers(model)} | {"layers", "norm", "tok_embeddings"}
    names |= set() if model.tie_embeddings else {"output"}
    for index in range(model.num_layers):
        block = f"layers.{index}"
        inner = ["attention_norm", "attention", "ffn_norm", "feed_forward"]
        inner += ["attention.q_norm", "attention.k_norm"] * model.qk_norm
        if _is_mixture(model, index):
            inner += ["feed_forward.router", "feed_forward.experts"]
            inner += ["feed_forward.shared"] * bool(model.moe.shared_ffn_dim)
        names |= {block, *(f"{block}.{name}" for name in inner)}
    return names


def _is_mixture(model: Any, index: int) -> bool:
    """As ``models.moe.is_mixture``."""
    moe = model.moe
    return bool(moe.num_experts and index >= moe.first_dense and (index + 1) % moe.every == 0)


def filter_without_module(filters: Sequence[str], names: Collection[str], *, example: str) -> Problem | None:
    """What is wrong with ``quant.filter_fqns``: an entry that is in no name of a module.

    Args:
        example: name of a linear layer.
    """
    if "" in filters:
        return Problem(
            "quant.filter_fqns",
            "has an empty text, which names no layer",
            allowed=f"parts of names such as {example}",
            hint=f"'quant.filter_fqns={spell([part for part in filters if part])}'",
        )
    absent = next((part for part in filters if not any(part in name for name in names)), None)
    if absent is None:
        return None
    short = sorted({name.rpartition(".")[2] for name in names})
    [near] = difflib.get_close_matches(absent, short, n=1, cutoff=0)
    left = [near if part == absent else part for part in filters]
    return Problem(
        "quant.filter_fqns",
        f"has {absent!r}, which is in no module's name",
        allowed=f"parts of names such as {example}",
        hint=f"'quant.filter_fqns={spell(left)}'",
    )


def reason_for_high_precision(quant: Any, name: str, n: int, k: int, *, tp: int = 1) -> str:
    """Why a layer whose weight is [n, k] on each of ``tp`` ranks stays as it is; "" where it is converted.

    Args:
        quant: with the recipe and the filters of the group's keys.
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
    """Whether the casts are likely to cost what the product gains (torchao's measurements on H100, by recipe)."""
    if recipe == "float8_tensorwise":
        return n <= 1024 and k <= 4096
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
