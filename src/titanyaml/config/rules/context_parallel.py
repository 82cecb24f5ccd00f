"""Rules of context parallelism: every rank gets an equal part of each sequence, and attention can look across."""

import math
from typing import Any

from titanyaml.config.rules.view import RuleTable, offer_multiples, offer_nearest, problem, settings
from titanyaml.config.world import resolve_degree
from titanyaml.errors import Problem

rule = RuleTable()


def _degrees(c: Any) -> tuple[int, int]:
    """(degree of cp, degree of tp); (1, 1) where there is nothing to check, or another rule speaks."""
    cp, tp = resolve_degree(c, "cp"), resolve_degree(c, "tp")
    return (1, 1) if cp is None or tp is None or cp < 2 or tp < 1 else (cp, tp)


def check_cp_divides_seq_len(seq_len: int, *, cp: int, tp: int, degrees: str = "") -> Problem | None:
    """Every cp rank holds two equal runs of positions, and its tp ranks share what it holds.

    Args:
        degrees: fixes that change the degrees.
    """
    # a run from the head and one from the tail of the sequence give every rank the same share of causal attention
    unit = cp * math.lcm(2, tp)
    if cp == 1 or seq_len % unit == 0:
        return None
    ranks = f"{cp} cp ranks of {tp} tp ranks" if tp > 1 else f"{cp} cp ranks"
    message = f"is {seq_len}, which {ranks} cannot share evenly"
    fixes = offer_multiples("train.seq_len", seq_len, unit)
    return problem("train.seq_len", message, f"multiples of cp*lcm(2, tp) = {unit}", fixes, degrees)


@rule("parallel", "launch", "train.seq_len")
def cp_divides_seq_len(c: Any) -> Problem | None:
    (cp, tp), seq_len = _degrees(c), c.train.seq_len
    if cp == 1:
        return None
    share = math.lcm(2, tp)
    legal = [1, *(n for n in range(2, seq_len // share + 1) if seq_len % (n * share) == 0)]
    degrees = offer_nearest("parallel.cp", cp, legal)
    return check_cp_divides_seq_len(seq_len, cp=cp, tp=tp, degrees=degrees)


def check_ulysses_divides_heads(num_heads: int, num_kv_heads: int, *, cp: int, tp: int) -> Problem | None:
    """The all-to-all of ulysses gives each of cp*tp ranks whole heads, all positions of them."""
    ranks, common = cp * tp, math.gcd(num_heads, num_kv_heads)
    if cp == 1 or common % ranks == 0:
        return None
    heads = f"model.num_heads={num_heads} and model.num_kv_heads={num_kv_heads}"
    message = f"is ulysses, which deals heads to {ranks} ranks (cp*tp); {heads} do not divide"
    allowed = f"ulysses with heads and key/value heads that are multiples of {ranks}"
    legal = [n for n in range(1, common + 1) if common % (n * tp) == 0]
    fixes = [settings("parallel.cp_method", ["allgather", "ring"]), offer_nearest("parallel.cp", cp, legal)]
    return problem("parallel.cp_method", message, allowed, *fixes)


@rule("parallel", "launch", "model.num_heads", "model.num_kv_heads")
def ulysses_divides_heads(c: Any) -> Problem | None:
    if c.parallel.cp_method != "ulysses":
        return None
    cp, tp = _degrees(c)
    return check_ulysses_divides_heads(c.model.num_heads, c.model.num_kv_heads, cp=cp, tp=tp)


@rule("parallel", "launch", "model.document_mask")
def ring_needs_no_document_mask(c: Any) -> Problem | None:
    # each pair of ranks attends wholly, causally or not at all; a mask would need a kernel that takes any mask
    if c.parallel.cp_method != "ring" or not c.model.document_mask or resolve_degree(c, "cp") in (None, 0, 1):
        return None
    message = "is ring, which is causal only, but model.document_mask is on"
    fixes = ("parallel.cp_method=allgather", "model.document_mask=false")
    return problem("parallel.cp_method", message, "allgather, ulysses", *fixes)
