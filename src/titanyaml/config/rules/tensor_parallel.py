"""Rules of tensor parallelism: every rank gets an equal part of heads, features, vocabulary and sequence."""

from __future__ import annotations

import math
from typing import Any

from titanyaml.config.rules.view import Rule, into, multiples_around, nearest_numbers, ways
from titanyaml.config.world import has_plugin_for, resolve_degree
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


def _divides(c: Any, key: str, size: int) -> Problem | None:
    """A problem where tp does not divide ``size``; the degrees that are offered divide all that is shared."""
    tp = resolve_degree(c, "tp")
    if tp is None or tp < 1 or size % tp == 0:
        return None
    shared = math.gcd(
        c.model.num_heads,
        c.model.num_kv_heads,
        c.model.ffn_dim,
        c.model.vocab_size,
        c.model.moe.shared_ffn_dim,
        c.train.seq_len if c.parallel.tp_sequence_parallel else 0,
    )
    degrees = [n for n in range(1, shared + 1) if shared % n == 0]
    near = multiples_around(size, tp)
    ranks = " launch.nproc=null" * (c.launch.nproc is not None)
    fewer = [f"parallel.tp={number}{ranks}" for number in nearest_numbers(tp, degrees)]
    return Problem(
        key,
        f"is {size}, which {tp} tensor-parallel ranks cannot share evenly",
        allowed=f"multiples of parallel.tp={tp}",
        hint=" or ".join([*fewer, ways(key, near)]),
    )


@rule("parallel", "launch", "pipeline.plugins")
def tensor_ranks_split_something(c: Any) -> Problem | None:
    """Without a plugin that splits the model all tp ranks would silently do the same work."""
    tp = resolve_degree(c, "tp")
    if has_plugin_for(c, "tp") or tp is None or tp < 2:
        return None
    return Problem(
        "pipeline.plugins.tp",
        f"is off, but {tp} ranks are to share every matrix",
        allowed="titanyaml.plugins.tp.TensorParallel, or a plugin of yours in its place",
        hint="parallel.tp=1",
    )


@rule("parallel", "launch", "model", "train.seq_len")
def tensor_ranks_share_heads(c: Any) -> Problem | None:
    return _divides(c, "model.num_heads", c.model.num_heads)


@rule("parallel", "launch", "model", "train.seq_len")
def tensor_ranks_share_kv_heads(c: Any) -> Problem | None:
    return _divides(c, "model.num_kv_heads", c.model.num_kv_heads)


@rule("parallel", "launch", "model", "train.seq_len")
def tensor_ranks_share_features(c: Any) -> Problem | None:
    return _divides(c, "model.ffn_dim", c.model.ffn_dim)


@rule("parallel", "launch", "model", "train.seq_len")
def tensor_ranks_share_features_of_the_shared_expert(c: Any) -> Problem | None:
    return _divides(c, "model.moe.shared_ffn_dim", c.model.moe.shared_ffn_dim)


@rule("parallel", "launch", "model", "train.seq_len")
def tensor_ranks_share_vocabulary(c: Any) -> Problem | None:
    return _divides(c, "model.vocab_size", c.model.vocab_size)


@rule("parallel", "launch", "model", "train.seq_len")
def tensor_ranks_share_the_sequence(c: Any) -> Problem | None:
    problem = _divides(c, "train.seq_len", c.train.seq_len) if c.parallel.tp_sequence_parallel else None
    if problem is None:
        return None
    return Problem(
        problem.key,
        problem.message,
        allowed=problem.allowed,
        hint=f"{problem.hint} or parallel.tp_sequence_parallel=false",
    )
