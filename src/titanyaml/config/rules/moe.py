"""Rules of mixtures of experts: some block is one, tokens find their experts, and the router learns."""

from dataclasses import fields
from typing import Any

from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.rules.view import RuleTable, divisors, offer_nearest, problem
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema import MoE
from titanyaml.config.world import resolve_degree
from titanyaml.errors import Problem

rule = RuleTable()


@rule("model.moe")
def moe_keys_need_experts(c: Any) -> Problem | None:
    # no ``when`` of the schema can say it: experts are there for any number but 0
    moe, default = c.model.moe, MoE()
    changed = [field.name for field in fields(MoE) if getattr(moe, field.name) != getattr(default, field.name)]
    if moe.num_experts or not changed:
        return None
    first = changed[0]
    message = f"is {spell(getattr(moe, first))}, but nothing reads it: the model has no experts"
    allowed = f"{spell(getattr(default, first))} with model.moe.num_experts=0"
    resets = " ".join(f"model.moe.{name}={spell(getattr(default, name))}" for name in changed)
    return problem(f"model.moe.{first}", message, allowed, "model=moe_debug", resets, is_unread=True)


@rule("model.num_layers", "model.moe")
def moe_reaches_a_block(c: Any) -> Problem | None:
    moe, layers = c.model.moe, c.model.num_layers
    if not moe.num_experts or any(block.mixture for block in DecoderShape.of(c.model).blocks):
        return None
    message = f"is {moe.first_dense}, and one block in {moe.every} is a mixture: none of the {layers} is"
    # both: with a period above the number of blocks no first_dense helps
    fix = "model.moe.first_dense=0 model.moe.every=1"
    return problem("model.moe.first_dense", message, f"0 .. {layers - 1} with model.moe.every=1", fix)


@rule("model.moe")
def groups_divide_experts(c: Any) -> Problem | None:
    groups, experts = c.model.moe.num_groups, c.model.moe.num_experts
    if experts % groups == 0:
        return None
    legal = divisors(experts)
    message = f"is {groups}, which does not divide model.moe.num_experts={experts}"
    fixes = offer_nearest("model.moe.num_groups", groups, legal)
    return problem("model.moe.num_groups", message, ", ".join(map(str, legal)), fixes)


@rule("model.moe")
def top_groups_fit_num_groups(c: Any) -> Problem | None:
    top, groups = c.model.moe.top_groups, c.model.moe.num_groups
    if top <= groups:
        return None
    key, message = "model.moe.top_groups", f"is {top}, more than model.moe.num_groups={groups}"
    return problem(key, message, f"1 .. {groups}", f"{key}={groups}")


@rule("model.moe")
def top_k_fits_num_experts(c: Any) -> Problem | None:
    moe = c.model.moe
    experts, scope = moe.num_experts, "of a block"
    if moe.num_groups > 1:  # a token may only use experts of its best groups
        experts = experts // moe.num_groups * moe.top_groups
        scope = f"in the model.moe.top_groups={moe.top_groups} groups of a token"
    if not moe.num_experts or moe.top_k <= experts:
        return None
    message = f"is {moe.top_k}, more than the {experts} experts {scope}"
    return problem("model.moe.top_k", message, f"1 .. {experts}", f"model.moe.top_k={max(experts, 1)}")


@rule("model.moe")
def router_gets_a_gradient(c: Any) -> Problem | None:
    moe = c.model.moe
    if not moe.normalize or moe.top_k > 1:
        return None
    # the weight of one expert divided by itself is 1, whatever the router says
    message = "is true, which makes the weight of the one expert of a token 1: the router gets no gradient"
    fixes = ("model.moe.normalize=false", "model.moe.top_k=2")
    return problem("model.moe.normalize", message, "false with model.moe.top_k=1", *fixes)


@rule("model.moe", "parallel", "launch")
def balance_loss_needs_whole_sequences(c: Any) -> Problem | None:
    # the loss is a product of two sums over a sequence: parts of it do not add up
    loss, cp = c.model.moe.balance_loss, resolve_degree(c, "cp")
    if not loss or cp in (None, 0, 1):
        return None
    message = f"is {loss:g}, a loss of whole sequences, which {cp} cp ranks split"
    allowed = "0 with parallel.cp above 1; model.moe.bias_rate evens out loads too"
    return problem("model.moe.balance_loss", message, allowed, "model.moe.balance_loss=0", "parallel.cp=1")
