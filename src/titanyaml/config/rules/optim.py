"""Rules of the optimizer: narrow moments, split masters, patterns of parameter groups."""

import re
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.errors import Problem

rule = RuleTable()

_WHOLE_MASTER = "optim.master=float32"


@rule("optim.name", "train.param_dtype")
def narrow_moments_need_float32_params(c: Any) -> Problem | None:
    if c.optim.name == "adamw" or c.train.param_dtype == "float32":
        return None
    message = f"is {c.optim.name}, but train.param_dtype is {c.train.param_dtype}"
    float32 = "train.param_dtype=float32 train.compute_dtype=auto train.reduce_dtype=float32"
    return problem("optim.name", message, "adamw; the others with train.param_dtype=float32", "optim=adamw", float32)


@rule("optim.master", "train", "runner.name", "hardware.memory_gib")
def split_master_needs_bfloat16_weights(c: Any) -> Problem | None:
    if c.optim.master != "split":
        return None
    dtype, is_wide, checked = c.train.compute_dtype, c.train.param_dtype == "float64", c.runner.name == "check"
    # a plan's device need not be here; nor a check's, where ``hardware`` describes one
    is_elsewhere = c.runner.name == "plan" or (checked and c.hardware.memory_gib is not None)
    on_cpu = dtype == "auto" and not is_elsewhere and not machine.gpus()
    narrow = "train.compute_dtype=bfloat16"
    if is_wide:
        narrow += " train.param_dtype=float32 train.reduce_dtype=float32"
    fixes = [_WHOLE_MASTER, narrow]
    if on_cpu or dtype not in ("auto", "bfloat16"):
        computed = "auto, which is float32 without a GPU" if on_cpu else dtype
        message = f"is split, but train.compute_dtype is {computed}: no weight is stored in bfloat16"
        if on_cpu and checked and not is_wide:
            fixes.append("hardware=h200")
    elif is_wide:
        message = "is split, but train.param_dtype is float64: 16 bits more than bfloat16 make float32"
    else:
        return None
    allowed = "float32; split where weights are computed with, and so stored, in bfloat16"
    return problem("optim.master", message, allowed, *fixes)


@rule("optim.master", "parallel.fsdp_cpu_offload")
def split_master_excludes_cpu_offload(c: Any) -> Problem | None:
    if c.optim.master != "split" or not c.parallel.fsdp_cpu_offload:
        return None
    offloaded = "with parallel.fsdp_cpu_offload weights and masters are in host memory"
    message = f"is split, to spare memory of the device, but {offloaded}"
    fixes = (_WHOLE_MASTER, "parallel.fsdp_cpu_offload=false")
    return problem("optim.master", message, "float32 with parallel.fsdp_cpu_offload", *fixes)


@rule("optim.master", "quant.fsdp_float8_all_gather", "quant.precompute_scale")
def split_master_excludes_float8_gather(c: Any) -> Problem | None:
    if c.optim.master != "split" or not c.quant.fsdp_float8_all_gather:
        return None
    message = "is split, but with quant.fsdp_float8_all_gather the float32 shards are what is cast to float8"
    precompute = " quant.precompute_scale=false" if c.quant.precompute_scale else ""
    fixes = (_WHOLE_MASTER, f"quant.fsdp_float8_all_gather=false{precompute}")
    return problem("optim.master", message, "float32 where FSDP gathers in float8", *fixes)


@rule("optim.groups")
def optim_group_patterns_are_valid(c: Any) -> Problem | None:
    for index, group in enumerate(c.optim.groups):
        try:
            re.compile(group.pattern)
        except re.error as error:
            return problem(f"optim.groups[{index}].pattern", f"{group.pattern!r} is no regular expression: {error}")
    return None
