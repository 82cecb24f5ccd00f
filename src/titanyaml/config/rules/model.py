"""Rules on the sizes of the model, and on its blocks without rotary embedding."""

from typing import Any

from titanyaml.config.rules.view import RuleTable, divisors, offer_multiples, offer_nearest, problem, settings
from titanyaml.config.world import resolve_degree
from titanyaml.errors import Problem

rule = RuleTable()


@rule("model.num_heads", "model.num_kv_heads")
def kv_heads_divide_heads(c: Any) -> Problem | None:
    heads, kv_heads = c.model.num_heads, c.model.num_kv_heads
    if heads % kv_heads == 0:
        return None
    legal = divisors(heads)
    message = f"is {kv_heads}, which does not divide model.num_heads={heads}"
    fixes = offer_nearest("model.num_kv_heads", kv_heads, legal)
    return problem("model.num_kv_heads", message, ", ".join(map(str, legal)), fixes)


@rule("model.dim", "model.num_heads", "model.head_dim")
def head_dim_is_even(c: Any) -> Problem | None:
    # rotary embedding turns pairs of coordinates
    dim, heads, head_dim = c.model.dim, c.model.num_heads, c.model.head_dim
    if head_dim is not None:
        if head_dim % 2 == 0:
            return None
        fixes = settings("model.head_dim", [head_dim - 1, head_dim + 1])
        return problem("model.head_dim", f"is {head_dim}; rotary embedding needs pairs", "an even number", fixes)
    unit = 2 * heads
    if dim % unit == 0:
        return None
    message = f"is {dim}, which gives model.num_heads={heads} heads a width of {dim / heads:g}"
    allowed = f"a multiple of 2*num_heads = {unit}, or model.head_dim given and even"
    return problem("model.dim", message, allowed, offer_multiples("model.dim", dim, unit))


@rule("model.rope_scaling")
def rope_scaling_factors_are_ordered(c: Any) -> Problem | None:
    scaling = c.model.rope_scaling
    if scaling is None or scaling.low_freq_factor <= scaling.high_freq_factor:
        return None
    key, low, high = "model.rope_scaling.high_freq_factor", scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 3.1 has 1 and 4; equal factors would leave no band in which to blend
    return problem(key, f"is {high:g}, below low_freq_factor={low:g}", f">= {low:g}", f"{key}={4 * low:g}")


@rule("train.seq_len", "model.max_seq_len")
def seq_len_fits_model(c: Any) -> Problem | None:
    seq_len, longest = c.train.seq_len, c.model.max_seq_len
    if seq_len <= longest:
        return None
    message = f"is {seq_len}, longer than model.max_seq_len={longest}"
    fixes = (f"train.seq_len={longest}", f"model.max_seq_len={seq_len}")
    return problem("train.seq_len", message, f"1 .. {longest}", *fixes)


@rule("model.attention_chunk", "train.seq_len", "parallel", "launch")
def attention_chunk_needs_one_cp_rank(c: Any) -> Problem | None:
    # attention across ranks knows causal runs only; a chunk that no sequence fills is no chunk
    chunk, seq_len, cp = c.model.attention_chunk, c.train.seq_len, resolve_degree(c, "cp")
    if chunk is None or seq_len <= chunk or cp in (None, 0, 1):
        return None
    message = f"is {chunk}, and the {cp} cp ranks share sequences of {seq_len} tokens: they cannot attend within chunks"
    allowed = f"train.seq_len or more with parallel.cp={cp}, or null"
    return problem("model.attention_chunk", message, allowed, f"train.seq_len={chunk}", "parallel.cp=1")


@rule("model.attention_temperature", "model.nope_every")
def attention_temperature_needs_nope_blocks(c: Any) -> Problem | None:
    temperature = c.model.attention_temperature
    if not temperature or c.model.nope_every:
        return None
    message = f"is {temperature:g}, but every block has rotary embedding: nothing reads it"
    fixes = ("model.attention_temperature=0", "model.nope_every=4")
    return problem("model.attention_temperature", message, "0 with model.nope_every=0", *fixes)
