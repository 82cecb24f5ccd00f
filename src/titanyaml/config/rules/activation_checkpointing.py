"""Rules of activation checkpointing: something is recomputed, and ``ac=auto`` can be decided."""

from __future__ import annotations

from typing import Any

from titanyaml import machine
from titanyaml.config.rules.hints import switch
from titanyaml.config.rules.view import Rule, into
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


def _ways(c: Any, *modes: str) -> str:
    return " or ".join(switch(c, f"ac={mode}", mode=mode) for mode in modes)


@rule("ac.mode", "ac.every", "model.num_layers")
def recompute_reaches_a_block(c: Any) -> Problem | None:
    if c.ac.mode != "selective_layer" or c.ac.every <= c.model.num_layers:
        return None
    return Problem(
        "ac.every",
        f"is {c.ac.every}, but the model has {c.model.num_layers} blocks: none is recomputed",
        allowed=f"1 .. {c.model.num_layers}",
        hint=f"ac.every={c.model.num_layers} or {_ways(c, 'none')}",
    )


@rule("ac.mode", "compile.mode", "runner.name")
def budget_needs_the_compiler(c: Any) -> Problem | None:
    """compile=auto compiles on a GPU only, which a plan has and this machine may lack."""
    if c.ac.mode != "memory_budget" or c.compile.mode in ("block", "model"):
        return None
    if c.compile.mode == "auto" and (c.runner.name == "plan" or machine.gpus()):
        return None
    return Problem(
        "ac.mode",
        f"is memory_budget, which the compiler keeps, but compile.mode={c.compile.mode} compiles nothing here",
        allowed="memory_budget with compile=block or compile=model",
        hint=f"compile=block or {_ways(c, 'selective_op')}",
    )


@rule("ac.mode", "ac.memory_gib", "hardware.memory_gib")
def chosen_recompute_has_a_limit(c: Any) -> Problem | None:
    if c.ac.mode != "auto" or c.ac.memory_gib is not None or c.hardware.memory_gib is not None or machine.gpus():
        return None
    return Problem(
        "ac.memory_gib",
        "is null, and there is no GPU here whose memory ac=auto could be kept within",
        allowed="GiB that a rank may reserve, or a hardware with hardware.memory_gib",
        hint="ac.memory_gib=16 or hardware=h200 or ac=none",
    )


@rule("ac.mode", "model.moe.num_experts")
def chosen_recompute_is_planned(c: Any) -> Problem | None:
    if c.ac.mode != "auto" or not c.model.moe.num_experts:
        return None
    return Problem(
        "ac.mode",
        "is auto, which is not decided for mixtures of experts: no plan of one was measured",
        allowed="any other mode",
        hint=_ways(c, "selective_op", "full", "none"),
    )


@rule("ac.mode", "runner.name")
def chosen_recompute_has_a_backward(c: Any) -> Problem | None:
    if c.ac.mode != "auto" or c.runner.name not in ("eval", "sample"):
        return None
    return Problem(
        "ac.mode",
        f"is auto, but runner={c.runner.name} has no backward pass in which to recompute",
        allowed="none",
        hint=_ways(c, "none"),
    )


@rule("ac.mode", "pipeline.plugins")
def chosen_recompute_has_its_plugin(c: Any) -> Problem | None:
    nodes = c.pipeline.plugins
    if c.ac.mode != "auto" or ("ac" in list(nodes) and getattr(nodes.ac, "_target_", None)):
        return None
    return Problem(
        "ac.mode",
        "is auto, but pipeline.plugins.ac, which would recompute, is off",
        allowed="none",
        hint=_ways(c, "none"),
    )
