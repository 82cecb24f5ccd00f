"""Rules of tensor parallelism: every rank gets an equal part of heads, features, vocabulary and sequence."""

import math
from operator import attrgetter
from typing import Any

from titanyaml.config.rules.hints import reset_nproc
from titanyaml.config.rules.view import RuleTable, divisors, nearest_numbers, offer_first, offer_multiples, problem
from titanyaml.config.world import resolve_degree
from titanyaml.errors import Problem

rule = RuleTable()

#: Sizes of the model that tp ranks share, of which each is a dimension of a split weight.
SPLIT_SIZES = ("model.num_heads", "model.num_kv_heads", "model.ffn_dim", "model.moe.shared_ffn_dim", "model.vocab_size")


def check_tp_divides(key: str, size: int, tp: int) -> Problem | None:
    """A size that ``tp`` ranks share is a multiple of tp."""
    if size % tp == 0:
        return None
    message = f"is {size}, which {tp} tensor-parallel ranks cannot share evenly"
    return problem(key, message, f"multiples of parallel.tp={tp}", offer_multiples(key, size, tp))


def _check_size(c: Any, key: str) -> Problem | None:
    """``check_tp_divides``, with the nearest degrees that divide all sizes as the first fixes."""
    tp = resolve_degree(c, "tp")
    size = attrgetter(key)(c)
    if tp is None or tp < 1 or not (refusal := check_tp_divides(key, size, tp)):
        return None
    seq_len = c.train.seq_len if c.parallel.tp_sequence_parallel else 0  # gcd(n, 0) is n
    common = math.gcd(seq_len, *(attrgetter(name)(c) for name in SPLIT_SIZES))
    degrees = nearest_numbers(tp, divisors(common))
    return offer_first(refusal, *(f"parallel.tp={degree}{reset_nproc(c)}" for degree in degrees))


def _add_size_rule(key: str) -> None:
    def check(c: Any) -> Problem | None:
        return _check_size(c, key)

    check.__name__ = f"tp_divides_{key.rpartition('.')[2]}"
    rule("parallel", "launch", "model", "train.seq_len")(check)


for _key in SPLIT_SIZES:
    _add_size_rule(_key)


@rule("parallel", "launch", "model", "train.seq_len")
def tp_divides_seq_len(c: Any) -> Problem | None:
    refusal = _check_size(c, "train.seq_len") if c.parallel.tp_sequence_parallel else None
    if refusal is None:
        return None
    fixes = f"{refusal.hint} or parallel.tp_sequence_parallel=false"
    return problem(refusal.key, refusal.message, refusal.allowed, fixes)
