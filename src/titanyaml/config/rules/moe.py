"""Rules of mixtures of experts, and of blocks without rotary embedding."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from titanyaml.config.rules.view import Rule, into, nearest_numbers, ways
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema import MoE
from titanyaml.config.world import resolve_degree
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


def num_mixtures(model: Any) -> int:
    """Blocks of ``model`` that are mixtures (``models.moe.is_mixture``)."""
    moe = model.moe
    if not moe.num_experts:
        return 0
    return model.num_layers // moe.every - min(moe.first_dense, model.num_layers) // moe.every


@rule("model.moe")
def keys_of_experts_are_read(c: Any) -> Problem | None:
    """Without experts nothing reads the other keys of the section."""
    moe, default = c.model.moe, MoE()
    given = [field.name for field in fields(MoE) if getattr(moe, field.name) != getattr(default, field.name)]
    if moe.num_experts or not given:
        return None
    back = " ".join(f"model.moe.{name}={spell(getattr(default, name))}" for name in given)
    now, unset = (spell(getattr(section, given[0])) for section in (moe, default))
    return Problem(
        f"model.moe.{given[0]}",
        f"is {now}, but nothing reads it: the model has no experts",
        allowed=f"{unset} with model.moe.num_experts=0",
        hint=f"model=moe_debug or {back}",
    )


@rule("model.num_layers", "model.moe")
def some_block_is_a_mixture(c: Any) -> Problem | None:
    moe, layers = c.model.moe, c.model.num_layers
    if not moe.num_experts or num_mixtures(c.model):
        return None
    return Problem(
        "model.moe.first_dense",
        f"is {moe.first_dense}, and one block in {moe.every} is a mixture: none of the {layers} is",
        allowed=f"0 .. {layers - 1} with model.moe.every=1",
        hint="model.moe.first_dense=0 model.moe.every=1",
    )


@rule("model.moe")
def groups_divide_experts(c: Any) -> Problem | None:
    moe = c.model.moe
    if moe.num_experts % moe.num_groups == 0:
        return None
    legal = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
    return Problem(
        "model.moe.num_groups",
        f"is {moe.num_groups}, which does not divide model.moe.num_experts={moe.num_experts}",
        allowed=", ".join(map(str, legal)),
        hint=ways("model.moe.num_groups", nearest_numbers(moe.num_groups, legal)),
    )


@rule("model.moe")
def chosen_groups_exist(c: Any) -> Problem | None:
    moe = c.model.moe
    if moe.top_groups <= moe.num_groups:
        return None
    return Problem(
        "model.moe.top_groups",
        f"is {moe.top_groups}, more than model.moe.num_groups={moe.num_groups}",
        allowed=f"1 .. {moe.num_groups}",
        hint=f"model.moe.top_groups={moe.num_groups}",
    )


@rule("model.moe")
def chosen_experts_exist(c: Any) -> Problem | None:
    moe = c.model.moe
    grouped = moe.num_groups > 1
    experts = moe.num_experts // moe.num_groups * moe.top_groups if grouped else moe.num_experts
    if not moe.num_experts or moe.top_k <= experts:
        return None
    where = f"in the model.moe.top_groups={moe.top_groups} groups of a token" if grouped else "of a block"
    return Problem(
        "model.moe.top_k",
        f"is {moe.top_k}, more than the {experts} experts {where}",
        allowed=f"1 .. {experts}",
        hint=f"model.moe.top_k={max(experts, 1)}",
    )


@rule("model.moe")
def router_learns(c: Any) -> Problem | None:
    """The weight of one expert divided by itself is 1 whatever the router says: it would get no gradient."""
    moe = c.model.moe
    if not moe.normalize or moe.top_k > 1:
        return None
    return Problem(
        "model.moe.normalize",
        "is true, which makes the weight of the one expert of a token 1: the router gets no gradient",
        allowed="false with model.moe.top_k=1",
        hint="model.moe.normalize=false or model.moe.top_k=2",
    )


@rule("model.moe", "parallel", "launch")
def balance_sees_whole_sequences(c: Any) -> Problem | None:
    moe, cp = c.model.moe, resolve_degree(c, "cp")
    if not moe.balance_loss or cp in (None, 0, 1):
        return None
    return Problem(
        "model.moe.balance_loss",
        f"is {moe.balance_loss:g}, a loss of whole sequences, which {cp} cp ranks split",
        allowed="0 with parallel.cp above 1; model.moe.bias_rate evens out loads too",
        hint="model.moe.balance_loss=0 or parallel.cp=1",
    )


@rule("model.attention_chunk", "train.seq_len", "parallel", "launch")
def chunks_are_whole(c: Any) -> Problem | None:
    chunk, length, cp = c.model.attention_chunk, c.train.seq_len, resolve_degree(c, "cp")
    if chunk is None or length <= chunk or cp in (None, 0, 1):
        return None
    return Problem(
        "model.attention_chunk",
        f"is {chunk}, and the {cp} cp ranks share sequences of {length} tokens: they cannot attend within chunks",
        allowed=f"train.seq_len or more with parallel.cp={cp}, or null",
        hint=f"train.seq_len={chunk} or parallel.cp=1",
    )


@rule("model.attention_temperature", "model.nope_every")
def temperature_has_blocks(c: Any) -> Problem | None:
    if not c.model.attention_temperature or c.model.nope_every:
        return None
    return Problem(
        "model.attention_temperature",
        f"is {c.model.attention_temperature:g}, but every block has rotary embedding: nothing reads it",
        allowed="0 with model.nope_every=0",
        hint="model.attention_temperature=0 or model.nope_every=4",
    )
