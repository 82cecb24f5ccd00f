"""Rules on the sizes of the model."""

from __future__ import annotations

from typing import Any

from titanyaml.config.rules.view import Rule, into, multiples_around, nearest_numbers, ways
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


@rule("model.num_heads", "model.num_kv_heads")
def kv_heads_divide_heads(c: Any) -> Problem | None:
    heads, kv = c.model.num_heads, c.model.num_kv_heads
    if heads % kv == 0:
        return None
    legal = [n for n in range(1, heads + 1) if heads % n == 0]
    return Problem(
        "model.num_kv_heads",
        f"is {kv}, which does not divide model.num_heads={heads}",
        allowed=", ".join(map(str, legal)),
        hint=ways("model.num_kv_heads", nearest_numbers(kv, legal)),
    )


@rule("model.dim", "model.num_heads", "model.head_dim")
def head_dim_is_even(c: Any) -> Problem | None:
    """Rotary embedding turns pairs of coordinates."""
    dim, heads, head_dim = c.model.dim, c.model.num_heads, c.model.head_dim
    if head_dim is not None:
        if head_dim % 2 == 0:
            return None
        return Problem(
            "model.head_dim",
            f"is {head_dim}; rotary embedding needs pairs",
            allowed="an even number",
            hint=ways("model.head_dim", [head_dim - 1, head_dim + 1]),
        )
    if dim % (2 * heads) == 0:
        return None
    near = multiples_around(dim, 2 * heads)
    return Problem(
        "model.dim",
        f"is {dim}, which gives model.num_heads={heads} heads a width of {dim / heads:g}",
        allowed=f"a multiple of 2*num_heads = {2 * heads}, or model.head_dim given and even",
        hint=ways("model.dim", near),
    )


@rule("model.rope_scaling")
def rope_bands_are_ordered(c: Any) -> Problem | None:
    scaling = c.model.rope_scaling
    if scaling is None or scaling.low_freq_factor <= scaling.high_freq_factor:
        return None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return Problem(
        "model.rope_scaling.high_freq_factor",
        f"is {high:g}, below low_freq_factor={low:g}",
        allowed=f">= {low:g}",
        hint=f"model.rope_scaling.high_freq_factor={4 * low:g}",
    )


@rule("train.seq_len", "model.max_seq_len")
def sequence_fits_model(c: Any) -> Problem | None:
    longest = c.model.max_seq_len
    if c.train.seq_len <= longest:
        return None
    return Problem(
        "train.seq_len",
        f"is {c.train.seq_len}, longer than model.max_seq_len={longest}",
        allowed=f"1 .. {longest}",
        hint=f"train.seq_len={longest} or model.max_seq_len={c.train.seq_len}",
    )
