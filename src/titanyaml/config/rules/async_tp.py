"""Rules of async tensor parallelism: it overlaps what tensor parallelism sends, in graphs that Inductor compiles."""

from __future__ import annotations

from typing import Any

from titanyaml import machine
from titanyaml.config.rules.hints import switch
from titanyaml.config.rules.view import Rule, into
from titanyaml.config.world import resolve_degree
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


def _off(c: Any) -> str:
    return switch(c, "compile.async_tp=false", async_tp=False)


@rule("compile.async_tp", "parallel", "launch", "model", "train.seq_len")
def async_tp_has_ranks(c: Any) -> Problem | None:
    if not c.compile.async_tp or resolve_degree(c, "tp") != 1:
        return None
    sizes = (c.model.num_heads, c.model.num_kv_heads, c.model.ffn_dim, c.model.vocab_size, c.train.seq_len)
    shared = next((n for n in range(2, min(sizes) + 1) if all(size % n == 0 for size in sizes)), None)
    hint = _off(c)
    if shared and c.launch.kind == "local":  # what torchrun started cannot be changed from here
        hint = f"parallel=tp{shared}" + (" launch.nproc=null" if c.launch.nproc else "") + f" or {_off(c)}"
    return Problem(
        "compile.async_tp",
        "is true, but parallel.tp is 1: there is no transfer to overlap",
        allowed="true where parallel.tp is 2 or more",
        hint=hint,
    )


@rule("compile.async_tp", "pipeline.plugins")
def async_tp_has_its_plugin(c: Any) -> Problem | None:
    nodes = c.pipeline.plugins
    if not c.compile.async_tp or ("async_tp" in list(nodes) and getattr(nodes.async_tp, "_target_", None)):
        return None
    return Problem(
        "pipeline.plugins.async_tp",
        "is off, but compile.async_tp is true",
        allowed="titanyaml.plugins.async_tp.AsyncTensorParallel where compile.async_tp is true",
        hint=_off(c),
    )


@rule("compile.async_tp", "compile.mode", "runner.name")
def async_tp_is_compiled(c: Any) -> Problem | None:
    mode = c.compile.mode
    if not c.compile.async_tp or mode not in ("none", "auto"):
        return None
    if mode == "auto" and (c.runner.name == "plan" or machine.gpus()):
        return None
    why = ", which compiles on a GPU only, and this machine has none" if mode == "auto" else ""
    return Problem(
        "compile.mode",
        f"is {mode}{why}; async tensor parallelism works in compiled graphs",
        allowed="block, model" + (", auto with a GPU" if mode == "none" else ""),
        hint=f"compile.mode=block or {_off(c)}",
    )


@rule("compile.async_tp", "parallel.tp_sequence_parallel")
def async_tp_splits_the_sequence(c: Any) -> Problem | None:
    if not c.compile.async_tp or c.parallel.tp_sequence_parallel:
        return None
    return Problem(
        "parallel.tp_sequence_parallel",
        "is false: the tp ranks then send all-reduces, which compile.async_tp cannot overlap",
        allowed="true",
        hint=f"parallel.tp_sequence_parallel=true or {_off(c)}",
    )


@rule("compile.async_tp", "compile.backend")
def async_tp_has_inductor(c: Any) -> Problem | None:
    if not c.compile.async_tp or c.compile.backend == "inductor":
        return None
    return Problem(
        "compile.backend",
        f"is {c.compile.backend}, which does not know compile.async_tp",
        allowed="inductor",
        hint=f"compile.backend=inductor or {_off(c)}",
    )


@rule("compile.async_tp", "quant.recipe")
def async_tp_knows_the_recipe(c: Any) -> Problem | None:
    if not c.compile.async_tp or c.quant.recipe != "mxfp8":
        return None
    return Problem(
        "compile.async_tp",
        "is true with quant.recipe=mxfp8, whose products have a scale for each block of "
        "numbers: no fused operator knows them",
        allowed="true without quant and with float8 recipes",
        hint=_off(c),
    )


@rule("compile.async_tp", "compile.async_tp_ops")
def async_tp_overlaps_something(c: Any) -> Problem | None:
    if not c.compile.async_tp or c.compile.async_tp_ops:
        return None
    return Problem(
        "compile.async_tp_ops",
        "is empty, and compile.async_tp is true",
        allowed="all_gather, reduce_scatter or both; auto",
        hint=f"compile.async_tp_ops=[auto] or "
        f"compile.async_tp_ops=[all_gather,reduce_scatter] or compile.async_tp_ops=[all_gather] or "
        f"compile.async_tp_ops=[reduce_scatter] or {_off(c)}",
    )


@rule("compile.async_tp", "compile.async_tp_ops")
def async_tp_is_chosen_once(c: Any) -> Problem | None:
    if not c.compile.async_tp or "auto" not in c.compile.async_tp_ops or len(c.compile.async_tp_ops) == 1:
        return None
    return Problem(
        "compile.async_tp_ops",
        "has auto beside others, and auto chooses among all of them",
        allowed="auto alone, or all_gather, reduce_scatter or both",
        hint="compile.async_tp_ops=[auto] or compile.async_tp_ops=[all_gather,reduce_scatter]",
    )
