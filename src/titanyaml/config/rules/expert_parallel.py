"""Rules of expert parallelism: ep ranks exist, hold equally many experts, and have tokens of their own."""

from collections.abc import Sequence
from typing import Any

from titanyaml.config.rules.view import RuleTable, nearest_numbers, offer_nearest, problem, settings
from titanyaml.config.world import resolve_degree, resolve_product, resolve_token_degree
from titanyaml.errors import Problem

rule = RuleTable()

_READS = ("parallel", "launch", "model.moe", "model.dim", "model.ffn_dim")


def _sizes(c: Any) -> tuple[int, int]:
    """(degree of ep, ranks that it reuses); (1, 1) where there is nothing to check, or another rule speaks."""
    ep, ranks = resolve_degree(c, "ep"), resolve_product(c, "dp_shard", "cp", "tp")
    return (1, 1) if ep is None or ranks is None or min(ep, ranks) < 1 else (ep, ranks)


def _cuts_unevenly(c: Any, shards: int) -> bool:
    """Whether FSDP cannot shard an expert's matrices over ``shards`` ranks.

    FSDP shards dimension 1 of [experts, out, in], which ep leaves whole, and only evenly (``plugins.fsdp``).
    """
    return bool((c.model.moe.ffn_dim or c.model.ffn_dim) % shards or c.model.dim % shards)


def _lacks_gradient_sum(c: Any, ep: int) -> bool:
    """Whether several ranks would hold the same experts, and no FSDP would sum their gradients."""
    return resolve_token_degree(c) == 1 and resolve_degree(c, "tp") != ep


def _legal_degrees(c: Any, ranks: int) -> list[int]:
    """Degrees that keep every rule of this file."""

    def is_legal(ep: int) -> bool:
        if ranks % ep or c.model.moe.num_experts % ep:
            return False
        return not (_cuts_unevenly(c, ranks // ep) or _lacks_gradient_sum(c, ep))

    return [1, *(ep for ep in range(2, ranks + 1) if is_legal(ep))]


def _refuse_degree(c: Any, message: str, allowed: str) -> Problem:
    ep, ranks = _sizes(c)
    return problem("parallel.ep", message, allowed, offer_nearest("parallel.ep", ep, _legal_degrees(c, ranks)))


def check_experts(ep: int, num_experts: int, *, legal: Sequence[int] = (1,)) -> Problem | None:
    """There are experts, and ep divides them. ``legal``: degrees of which the nearest are offered."""
    if ep == 1:
        return None
    if not num_experts:
        return problem("parallel.ep", f"is {ep}, but the model has no experts", "1", "parallel.ep=1")
    if num_experts % ep == 0:
        return None
    message = f"is {ep}, which does not divide model.moe.num_experts={num_experts}"
    return problem("parallel.ep", message, f"divisors of {num_experts}", settings("parallel.ep", legal))


@rule("parallel", "launch", "model.moe.num_experts")
def ep_needs_experts(c: Any) -> Problem | None:
    ep, _ = _sizes(c)
    return None if ep == 1 or c.model.moe.num_experts else check_experts(ep, 0)


@rule(*_READS)
def ep_divides_its_ranks(c: Any) -> Problem | None:
    ep, ranks = _sizes(c)
    if ranks % ep == 0:
        return None
    message = f"is {ep}, which does not divide the {ranks} ranks of dp_shard*cp*tp that it reuses"
    return _refuse_degree(c, message, f"divisors of {ranks}")


@rule(*_READS)
def ep_divides_num_experts(c: Any) -> Problem | None:
    (ep, ranks), experts = _sizes(c), c.model.moe.num_experts
    if experts % ep == 0 or ranks % ep:
        return None
    return check_experts(ep, experts, legal=nearest_numbers(ep, _legal_degrees(c, ranks)))


@rule(*_READS)
def expert_shards_are_equal(c: Any) -> Problem | None:
    ep, ranks = _sizes(c)
    if ep == 1 or ranks % ep or not _cuts_unevenly(c, ranks // ep):
        return None
    message = f"is {ep}: the {ranks // ep} ranks that hold the same experts cannot cut their matrices evenly"
    return _refuse_degree(c, message, f"dp_shard*cp*tp / ep divides model.dim={c.model.dim} and the experts' width")


@rule(*_READS)
def expert_replicas_need_fsdp(c: Any) -> Problem | None:
    ep, ranks = _sizes(c)
    if ep == 1 or ranks % ep or not _lacks_gradient_sum(c, ep):
        return None
    message = f"is {ep} of {ranks} tp ranks: without data ranks nothing sums the gradients of those that hold "
    return _refuse_degree(c, f"{message}the same experts", f"{ranks} or 1 with one data rank")


@rule("parallel", "launch")
def ep_needs_sequence_parallel(c: Any) -> Problem | None:
    # with whole sequences on every tp rank each token would be sent, and counted, once by each
    if c.parallel.tp_sequence_parallel or (ep := _sizes(c)[0]) == 1 or resolve_degree(c, "tp") == 1:
        return None
    key = "parallel.tp_sequence_parallel"
    message = f"is false, so that tp ranks hold the same tokens, but {ep} ep ranks are to exchange different ones"
    return problem(key, message, "true with parallel.ep above 1", f"{key}=true", "parallel.ep=1")
