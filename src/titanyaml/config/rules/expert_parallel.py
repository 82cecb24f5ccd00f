"""Rules of expert parallelism: ranks that share out experts exist, get equally many, and hold tokens of their own."""

from __future__ import annotations

import math
from typing import Any

from titanyaml.config.rules.view import Rule, into, nearest_numbers, ways
from titanyaml.config.world import has_plugin_for, resolve_degree
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


def _sizes(c: Any) -> tuple[int, int]:
    """(degree of ep, ranks that it may use); (1, 1) where there is nothing to say, or another rule says it."""
    degrees = [resolve_degree(c, axis) for axis in ("ep", "dp_shard", "cp", "tp")]
    if None in degrees or min(degrees) < 1:
        return 1, 1
    return degrees[0], math.prod(degrees[1:])


def _problem(c: Any, message: str, allowed: str) -> Problem:
    """About ``parallel.ep``; offers the nearest degrees that keep every rule of this file."""
    ep, ranks = _sizes(c)
    legal = [
        n
        for n in range(1, ranks + 1)
        if n == 1 or not (ranks % n or c.model.moe.num_experts % n or _uneven(c, ranks // n) or _unsummed(c, n))
    ]
    return Problem("parallel.ep", message, allowed=allowed, hint=ways("parallel.ep", nearest_numbers(ep, legal)))


def _uneven(c: Any, shards: int) -> bool:
    """Whether FSDP cannot share an expert's matrices over ``shards`` ranks: it cuts dimension 1, in equal parts."""
    return bool((c.model.moe.ffn_dim or c.model.ffn_dim) % shards or c.model.dim % shards)


def _unsummed(c: Any, ep: int) -> bool:
    """Whether several ranks would hold the same experts, and no FSDP would sum their gradients."""
    data = [resolve_degree(c, axis) for axis in ("dp_replicate", "dp_shard", "cp")]
    return None not in data and math.prod(data) == 1 and resolve_degree(c, "tp") != ep


@rule("parallel", "launch", "model.moe.num_experts")
def expert_ranks_have_experts(c: Any) -> Problem | None:
    ep, _ = _sizes(c)
    if ep == 1 or c.model.moe.num_experts:
        return None
    return Problem("parallel.ep", f"is {ep}, but the model has no experts", allowed="1", hint="parallel.ep=1")


@rule("parallel", "launch", "model.moe", "model.dim", "model.ffn_dim")
def expert_ranks_are_there(c: Any) -> Problem | None:
    ep, ranks = _sizes(c)
    if ranks % ep == 0:
        return None
    return _problem(
        c, f"is {ep}, which does not divide the {ranks} ranks of dp_shard*cp*tp that it reuses", f"divisors of {ranks}"
    )


@rule("parallel", "launch", "model.moe", "model.dim", "model.ffn_dim")
def expert_ranks_share_experts(c: Any) -> Problem | None:
    (ep, ranks), experts = _sizes(c), c.model.moe.num_experts
    if experts % ep == 0 or ranks % ep:
        return None
    return _problem(c, f"is {ep}, which does not divide model.moe.num_experts={experts}", f"divisors of {experts}")


@rule("parallel", "launch", "model.moe", "model.dim", "model.ffn_dim")
def copies_of_experts_are_cut_evenly(c: Any) -> Problem | None:
    ep, ranks = _sizes(c)
    if ep == 1 or ranks % ep or not _uneven(c, ranks // ep):
        return None
    return _problem(
        c,
        f"is {ep}: the {ranks // ep} ranks that hold the same experts cannot cut their matrices evenly",
        f"dp_shard*cp*tp / ep divides model.dim={c.model.dim} and the experts' width",
    )


@rule("parallel", "launch", "model.moe", "model.dim", "model.ffn_dim")
def copies_of_experts_share_gradients(c: Any) -> Problem | None:
    ep, ranks = _sizes(c)
    if ep == 1 or ranks % ep or not _unsummed(c, ep):
        return None
    return _problem(
        c,
        f"is {ep} of {ranks} tp ranks: without data ranks nothing sums the gradients of those that hold "
        "the same experts",
        f"{ranks} or 1 with one data rank",
    )


@rule("parallel", "launch")
def expert_ranks_hold_their_own_tokens(c: Any) -> Problem | None:
    """Whole sequences on every tp rank would be sent, and counted, once by each."""
    if c.parallel.tp_sequence_parallel or _sizes(c)[0] == 1 or resolve_degree(c, "tp") == 1:
        return None
    return Problem(
        "parallel.tp_sequence_parallel",
        f"is false, so that tp ranks hold the same tokens, but {_sizes(c)[0]} ep ranks are to exchange different ones",
        allowed="true with parallel.ep above 1",
        hint="parallel.tp_sequence_parallel=true or parallel.ep=1",
    )


@rule("parallel", "launch", "pipeline.plugins")
def expert_ranks_split_something(c: Any) -> Problem | None:
    """Without a plugin that spreads them every rank would hold all experts, and FSDP would look for others."""
    ep = _sizes(c)[0]
    if has_plugin_for(c, "ep") or ep == 1:
        return None
    return Problem(
        "pipeline.plugins.ep",
        f"is off, but {ep} ranks are to share out the experts",
        allowed="titanyaml.plugins.ep.ExpertParallel, or a plugin of yours in its place",
        hint="parallel.ep=1",
    )
