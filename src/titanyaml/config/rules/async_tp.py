"""Rules of async tensor parallelism: it overlaps the collectives of tp, in graphs that Inductor compiles."""

from collections.abc import Sequence
from typing import Any

from titanyaml.config.rules.hints import reset_nproc, with_resets
from titanyaml.config.rules.view import RuleTable, problem, settings
from titanyaml.config.world import has_gpu, resolve_degree
from titanyaml.errors import Problem

rule = RuleTable()

#: Collectives that can be overlapped with matmuls, and the value that stands for those that gain by it.
OPERATORS, AUTO = ("all_gather", "reduce_scatter"), "auto"


def _switch_off(c: Any) -> str:
    return with_resets(c, "compile.async_tp=false", async_tp=False)


@rule("compile.async_tp", "parallel", "launch", "model", "train.seq_len")
def async_tp_needs_tp(c: Any) -> Problem | None:
    if not c.compile.async_tp or resolve_degree(c, "tp") != 1:
        return None
    sizes = (c.model.num_heads, c.model.num_kv_heads, c.model.ffn_dim, c.model.vocab_size, c.train.seq_len)
    # two ranks at least, and as few as divide all that is split
    legal = (tp for tp in range(2, min(sizes) + 1) if all(size % tp == 0 for size in sizes))
    fewest = next(legal, None)
    # torchrun's ranks cannot be changed from here
    mesh = f"parallel=tp{fewest}{reset_nproc(c)}" if fewest and c.launch.kind == "local" else ""
    message = "is true, but parallel.tp is 1: there is no transfer to overlap"
    return problem("compile.async_tp", message, "true where parallel.tp is 2 or more", mesh, _switch_off(c))


@rule("compile.async_tp", "compile.mode", "runner.name")
def async_tp_needs_compile(c: Any) -> Problem | None:
    mode = c.compile.mode
    if not c.compile.async_tp or mode not in ("none", "auto") or (mode == "auto" and has_gpu(c)):
        return None
    reason = ", which compiles on a GPU only, and this machine has none" if mode == "auto" else ""
    message = f"is {mode}{reason}; async tensor parallelism works in compiled graphs"
    allowed = "block, model" if mode == "auto" else "block, model, auto with a GPU"
    return problem("compile.mode", message, allowed, "compile.mode=block", _switch_off(c))


@rule("compile.async_tp", "parallel.tp_sequence_parallel")
def async_tp_needs_sequence_parallel(c: Any) -> Problem | None:
    if not c.compile.async_tp or c.parallel.tp_sequence_parallel:
        return None
    key = "parallel.tp_sequence_parallel"
    message = "is false: the tp ranks then send all-reduces, which compile.async_tp cannot overlap"
    return problem(key, message, "true", f"{key}=true", _switch_off(c))


@rule("compile.async_tp", "compile.backend")
def async_tp_needs_inductor(c: Any) -> Problem | None:
    backend = c.compile.backend
    if not c.compile.async_tp or backend == "inductor":
        return None
    message = f"is {backend}, which does not know compile.async_tp"
    return problem("compile.backend", message, "inductor", "compile.backend=inductor", _switch_off(c))


@rule("compile.async_tp", "quant.recipe")
def async_tp_excludes_mxfp8(c: Any) -> Problem | None:
    if not c.compile.async_tp or c.quant.recipe != "mxfp8":
        return None
    matmuls = "matmuls have a scale for each block of numbers: no fused operator knows them"
    message = f"is true with quant.recipe=mxfp8, whose {matmuls}"
    return problem("compile.async_tp", message, "true without quant and with float8 recipes", _switch_off(c))


def check_operators(operators: Sequence[str], *fixes: str) -> Problem | None:
    """``compile.async_tp_ops`` names collectives, or ``auto`` alone, which chooses among all of them."""
    unknown = [operator for operator in operators if operator not in (*OPERATORS, AUTO)]
    if not operators:
        message = "is empty, and compile.async_tp is true"
    elif unknown:
        message = f"has {unknown[0]!r}, which is no collective of tp"
    elif AUTO in operators and len(operators) > 1:
        message = "has auto beside others, and auto chooses among all of them"
    else:
        return None
    alternatives = settings("compile.async_tp_ops", [f"[{AUTO}]", f"[{','.join(OPERATORS)}]"])
    allowed = f"some of {', '.join(OPERATORS)}; or {AUTO} alone"
    return problem("compile.async_tp_ops", message, allowed, alternatives, *fixes)


@rule("compile.async_tp", "compile.async_tp_ops")
def async_tp_ops_are_usable(c: Any) -> Problem | None:
    return check_operators(c.compile.async_tp_ops, _switch_off(c)) if c.compile.async_tp else None
