"""Rules of context parallelism: every rank gets an equal part of each sequence, and attention can look across."""

from __future__ import annotations

import math
from typing import Any

from titanyaml.config.rules.view import Rule, into, multiples_around, nearest_numbers, ways
from titanyaml.config.world import has_plugin_for, resolve_degree
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


@rule("parallel", "launch", "pipeline.plugins")
def context_ranks_split_something(c: Any) -> Problem | None:
    """Without a plugin that cuts the sequence all cp ranks would count the same tokens."""
    cp = resolve_degree(c, "cp")
    if has_plugin_for(c, "cp") or cp is None or cp < 2:
        return None
    return Problem(
        "pipeline.plugins.cp",
        f"is off, but {cp} ranks are to share every sequence",
        allowed="titanyaml.plugins.cp.ContextParallel, or a plugin of yours in its place",
        hint="parallel.cp=1",
    )


@rule("parallel", "launch", "train.seq_len")
def context_ranks_share_the_sequence(c: Any) -> Problem | None:
    """Two runs of positions a rank, each a multiple of what tp shares, so that every rank has the same work."""
    cp, tp, length = resolve_degree(c, "cp"), resolve_degree(c, "tp"), c.train.seq_len
    if cp is None or tp is None or cp < 2 or tp < 1:
        return None
    share = math.lcm(2, tp)
    if length % (cp * share) == 0:
        return None
    degrees = [1, *(n for n in range(2, length // share + 1) if length % (n * share) == 0)]
    spelled = f"{cp} cp ranks" + (f" of {tp} tp ranks" if tp > 1 else "")
    return Problem(
        "train.seq_len",
        f"is {length}, which {spelled} cannot share evenly",
        allowed=f"multiples of cp*lcm(2, tp) = {cp * share}",
        hint=f"{ways('train.seq_len', multiples_around(length, cp * share))} or "
        f"{ways('parallel.cp', nearest_numbers(cp, degrees))}",
    )


@rule("parallel", "launch", "model.num_heads", "model.num_kv_heads")
def ulysses_shares_heads(c: Any) -> Problem | None:
    cp, tp, heads = resolve_degree(c, "cp"), resolve_degree(c, "tp"), math.gcd(c.model.num_heads, c.model.num_kv_heads)
    if cp is None or tp is None or cp < 2 or tp < 1 or c.parallel.cp_method != "ulysses" or heads % (cp * tp) == 0:
        return None
    degrees = [n for n in range(1, heads + 1) if heads % (n * tp) == 0]
    smaller = f" or {ways('parallel.cp', nearest_numbers(cp, degrees))}" if degrees else ""
    return Problem(
        "parallel.cp_method",
        f"is ulysses, which deals heads to {cp * tp} ranks (cp*tp); "
        f"model.num_heads={c.model.num_heads} and model.num_kv_heads={c.model.num_kv_heads} do not divide",
        allowed=f"ulysses with heads and key/value heads that are multiples of {cp * tp}",
        hint=f"parallel.cp_method=allgather or parallel.cp_method=ring{smaller}",
    )


@rule("parallel", "launch", "model.document_mask")
def ring_takes_no_mask(c: Any) -> Problem | None:
    """Its parts are whole or causal; a mask would need a kernel that takes any, for each pair of ranks."""
    if c.parallel.cp_method != "ring" or not c.model.document_mask or resolve_degree(c, "cp") in (None, 0, 1):
        return None
    return Problem(
        "parallel.cp_method",
        "is ring, which is causal only, but model.document_mask is on",
        allowed="allgather, ulysses",
        hint="parallel.cp_method=allgather or model.document_mask=false",
    )
