"""Rules of activation checkpointing: some block is recomputed, and ``ac=auto`` can be decided."""

from typing import Any

from titanyaml import machine
from titanyaml.config.rules.hints import with_resets
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.config.world import has_gpu, is_node_on
from titanyaml.errors import Problem

rule = RuleTable()


def _use_mode(c: Any, *modes: str) -> list[str]:
    return [with_resets(c, f"ac={mode}", mode=mode) for mode in modes]


@rule("ac.mode", "ac.every", "model.num_layers")
def ac_every_reaches_a_block(c: Any) -> Problem | None:
    period, layers = c.ac.every, c.model.num_layers
    if c.ac.mode != "selective_layer" or period <= layers:
        return None
    message = f"is {period}, but the model has {layers} blocks: none is recomputed"
    return problem("ac.every", message, f"1 .. {layers}", f"ac.every={layers}", *_use_mode(c, "none"))


@rule("ac.mode", "compile.mode", "runner.name")
def ac_budget_needs_compile(c: Any) -> Problem | None:
    mode = c.compile.mode
    if c.ac.mode != "memory_budget" or mode in ("block", "model") or (mode == "auto" and has_gpu(c)):
        return None
    return check_budget(c.ac.mode, f"compile.mode={mode} compiles nothing here", *_use_mode(c, "selective_op"))


def check_budget(ac_mode: str, uncompiled: str, *fixes: str) -> Problem | None:
    """A memory budget is kept by torch.compile's partitioner. ``uncompiled``: why nothing is compiled, "" if it is."""
    if ac_mode != "memory_budget" or not uncompiled:
        return None
    message = f"is memory_budget, which the compiler keeps, but {uncompiled}"
    allowed = "memory_budget with compile=block or compile=model"
    return problem("ac.mode", message, allowed, "compile=block", *fixes)


@rule("ac.mode", "ac.memory_gib", "hardware.memory_gib")
def ac_auto_needs_a_memory_limit(c: Any) -> Problem | None:
    if c.ac.mode != "auto" or c.ac.memory_gib is not None or c.hardware.memory_gib is not None or machine.gpus():
        return None
    message = "is null, and there is no GPU here whose memory ac=auto could be kept within"
    allowed = "GiB that a rank may reserve, or a hardware with hardware.memory_gib"
    return problem("ac.memory_gib", message, allowed, "ac.memory_gib=16", "hardware=h200", "ac=none")


@rule("ac.mode", "model.moe.num_experts")
def ac_auto_needs_a_dense_model(c: Any) -> Problem | None:
    if c.ac.mode != "auto" or not c.model.moe.num_experts:
        return None
    message = "is auto, which is not decided for mixtures of experts: no plan of one was measured"
    return problem("ac.mode", message, "any other mode", *_use_mode(c, "selective_op", "full", "none"))


@rule("ac.mode", "runner.name")
def ac_auto_needs_a_backward_pass(c: Any) -> Problem | None:
    if c.ac.mode != "auto" or c.runner.name not in ("eval", "sample"):
        return None
    message = f"is auto, but runner={c.runner.name} has no backward pass in which to recompute"
    return problem("ac.mode", message, "none", *_use_mode(c, "none"))


@rule("ac.mode", "pipeline.plugins")
def ac_auto_needs_its_plugin(c: Any) -> Problem | None:
    if c.ac.mode != "auto" or is_node_on(c, "ac"):
        return None
    message = "is auto, but pipeline.plugins.ac, which would recompute, is off"
    return problem("ac.mode", message, "none", *_use_mode(c, "none"))
