"""Rules of float8 training, and of weights and moments in few bits."""

from __future__ import annotations

import math
from typing import Any

from titanyaml import machine
from titanyaml.config.decoder_layers import (
    ALIGNMENT,
    filter_without_module,
    linear_layers,
    module_names,
    reason_for_high_precision,
)
from titanyaml.config.rules.hints import switch
from titanyaml.config.rules.view import Rule, into, multiples_around, nearest_numbers, ways
from titanyaml.config.world import only_shipped_plugins, resolve_degree
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)

#: CUDA compute capability of the devices in conf/hardware, and what multiplying in these formats takes.
CAPABILITY = {
    "a100_40gb": 8.0,
    "a100_80gb": 8.0,
    "h100_sxm": 9.0,
    "h100_500w": 9.0,
    "h100_pcie": 9.0,
    "h200": 9.0,
    "gh200": 9.0,
    "b200": 10.0,
}
FLOAT8_CAPABILITY, MX_CAPABILITY = 8.9, 10.0


@rule("quant", "hardware.name", "runner.name")
def device_multiplies_in_float8(c: Any) -> Problem | None:
    """What is not known here (a GPU without a name) is asked of the device itself."""
    recipe = c.quant.recipe
    if recipe == "none" or c.quant.emulate:
        return None
    needed = MX_CAPABILITY if recipe == "mxfp8" else FLOAT8_CAPABILITY
    found = CAPABILITY.get(c.hardware.name)
    here = c.runner.name != "plan"  # a plan's device need not be here
    if (machine.gpus() or not here) and (found is None or found >= needed):
        return None
    lack = (
        f"hardware={c.hardware.name} has compute capability {found:g}"
        if found and found < needed
        else "this machine has no GPU"
    )
    emulated = "quant.emulate=true" + " quant.fast_accum=null" * bool(c.quant.fast_accum)
    if c.quant.product == "own" and here and machine.gpus():
        emulated = f"quant.emulate=true {_torchao(c)}"
    return Problem(
        "quant.recipe",
        f"is {recipe}, but {lack}",
        allowed=f"a GPU of compute capability {needed:g} or higher",
        hint=f"{emulated} or {_none(c)}",
    )


@rule("quant.product", "quant.emulate", "runner.name")
def own_products_are_emulated_on_a_cpu(c: Any) -> Problem | None:
    if c.quant.product != "own" or not c.quant.emulate or c.runner.name == "plan" or not machine.gpus():
        return None
    return Problem(
        "quant.emulate",
        "is true, but quant.product=own emulates on a CPU only, and there is a GPU here",
        allowed="false with quant.product=own",
        hint=f"quant.emulate=false or {_torchao(c)}",
    )


@rule("quant.product", "quant.fsdp_float8_all_gather", "parallel.fsdp_cpu_offload")
def own_float8_copies_stay_on_the_device(c: Any) -> Problem | None:
    if c.quant.product != "own" or not c.quant.fsdp_float8_all_gather or not c.parallel.fsdp_cpu_offload:
        return None
    return Problem(
        "quant.product",
        "is own, whose float8 copies of the shards lie on the device, but "
        "parallel.fsdp_cpu_offload is true: the weights they are made of lie in host memory",
        allowed="torchao with both",
        hint=f"{_torchao(c)} or {_no_gather(c)} or parallel.fsdp_cpu_offload=false",
    )


def _torchao(c: Any) -> str:
    """What to type for torchao's products: nothing may be left that only our own read."""
    rest = " quant.fast_accum=null" * (c.quant.fast_accum is not None)
    rest += " quant.grad_dtype=auto" * (c.quant.grad_dtype != "auto")
    return f"quant.product=torchao{rest}"


def _none(c: Any) -> str:
    return switch(c, "quant=none", recipe="none")


def _tensorwise(c: Any) -> str:
    return switch(c, "quant=float8_tensorwise", recipe="float8_tensorwise")


@rule("quant.fast_accum", "quant.emulate")
def emulation_has_no_short_accumulator(c: Any) -> Problem | None:
    if not (c.quant.fast_accum and c.quant.emulate):
        return None
    return Problem(
        "quant.fast_accum",
        "is true, but quant.emulate=true multiplies in float32: it would change nothing",
        allowed="false or null with emulation",
        hint="quant.fast_accum=null",
    )


@rule("quant.recipe", "quant.fsdp_float8_all_gather")
def float8_gather_has_one_scale(c: Any) -> Problem | None:
    if not c.quant.fsdp_float8_all_gather or c.quant.recipe in ("none", "float8_tensorwise"):
        return None
    return Problem(
        "quant.fsdp_float8_all_gather",
        f"is true with {c.quant.recipe}, which casts a weight along both of "
        "its sides: the gathered bytes would serve one of them",
        allowed="quant=float8_tensorwise",
        hint=f"{_no_gather(c)} or {_tensorwise(c)}",
    )


@rule("quant.fsdp_float8_all_gather", "parallel", "launch")
def float8_gather_has_shards(c: Any) -> Problem | None:
    if not c.quant.fsdp_float8_all_gather or (resolve_degree(c, "dp_shard"), resolve_degree(c, "cp")) != (1, 1):
        return None
    return Problem(
        "quant.fsdp_float8_all_gather",
        "is true, but parallel.dp_shard is 1: nothing is gathered",
        allowed="parallel.dp_shard of 2 or more",
        hint=f"{_no_gather(c)} or parallel=fsdp2" + " launch.nproc=null" * (c.launch.nproc is not None),
    )


def _no_gather(c: Any) -> str:
    precompute = " quant.precompute_scale=false" if c.quant.precompute_scale else ""
    return f"quant.fsdp_float8_all_gather=false{precompute}"


@rule("quant.fsdp_float8_all_gather", "quant.force_recompute_weight")
def gathered_float8_is_not_kept_twice(c: Any) -> Problem | None:
    if not c.quant.fsdp_float8_all_gather or c.quant.force_recompute_weight:
        return None
    return Problem(
        "quant.force_recompute_weight",
        "is false, but weights come in float8 from quant.fsdp_float8_all_gather: there is no copy to keep",
        allowed="true",
        hint=f"quant.force_recompute_weight=true or {_no_gather(c)}",
    )


@rule("quant.recipe", "quant.product", "quant.force_recompute_weight")
def kept_float8_weights_have_one_scale(c: Any) -> Problem | None:
    if c.quant.force_recompute_weight or c.quant.product == "own" or c.quant.recipe in ("none", "float8_tensorwise"):
        return None
    return Problem(
        "quant.force_recompute_weight",
        f"is false with {c.quant.recipe}, where torchao casts a weight along another side in the backward pass",
        allowed="true; false with own or tensorwise",
        hint="quant.force_recompute_weight=true or quant.product=own",
    )


@rule("quant.product", "quant.force_recompute_weight", "compile.mode", "runner.name")
def kept_float8_weights_are_not_compiled(c: Any) -> Problem | None:
    """compile=auto compiles on a GPU only, which a plan has and this machine may lack."""
    if c.quant.force_recompute_weight or c.quant.product == "own" or "none" in (c.quant.recipe, c.compile.mode):
        return None
    if c.compile.mode == "auto" and c.runner.name != "plan" and not machine.gpus():
        return None
    return Problem(
        "quant.force_recompute_weight",
        "is false, but with torchao's products a compiled graph casts each weight again in any case",
        allowed="true; false with own, or with compile=none",
        hint="quant.force_recompute_weight=true or quant.product=own",
    )


@rule("quant.filter_fqns", "model", "pipeline.plugins")
def filters_name_modules(c: Any) -> Problem | None:
    """A plugin of others may bring modules with other names: then the node asks."""
    if not c.quant.filter_fqns or not only_shipped_plugins(c):
        return None
    return filter_without_module(c.quant.filter_fqns, module_names(c.model), example=linear_layers(c.model)[0].name)


@rule("quant", "model", "parallel", "launch", "pipeline.plugins")
def float8_is_for_some_layer(c: Any) -> Problem | None:
    tp = resolve_degree(c, "tp")
    if c.quant.recipe == "none" or not tp or not only_shipped_plugins(c):
        return None
    layers = linear_layers(c.model)
    reasons = {reason_for_high_precision(c.quant, layer.name, *layer.on_each(tp), tp=tp): layer for layer in layers}
    if "" in reasons:
        return None
    told = "; ".join(f"{layer.name}: {reason}" for reason, layer in reasons.items())
    off = " quant.auto_filter_small_kn=false" * c.quant.auto_filter_small_kn
    off += " quant.filter_fqns=[]" * bool(c.quant.filter_fqns)
    unit = ALIGNMENT[c.quant.recipe]
    fits = off and any(n % unit == k % unit == 0 for n, k in (layer.on_each(tp) for layer in layers))
    return Problem(
        "quant.recipe",
        f"is {c.quant.recipe}, but no layer can be converted: {told}",
        hint=(f"{off.strip()} or " if fits else "") + _none(c),
    )


@rule("quant.recipe", "train.compute_dtype")
def float8_is_not_float64(c: Any) -> Problem | None:
    if c.quant.recipe == "none" or c.train.compute_dtype != "float64":
        return None
    return Problem(
        "quant.recipe",
        f"is {c.quant.recipe}, but train.compute_dtype is float64, which is for exact comparisons",
        allowed="none with float64",
        hint=f"{_none(c)} or train.compute_dtype=auto train.param_dtype=float32 train.reduce_dtype=float32",
    )


@rule("quant", "train.compute_dtype")
def scales_per_row_take_bfloat16(c: Any) -> Problem | None:
    recipe = c.quant.recipe
    if recipe in ("none", "float8_tensorwise") or c.quant.emulate or c.train.compute_dtype != "float32":
        return None
    return Problem(
        "train.compute_dtype",
        f"is float32, but a product in {recipe} comes out in bfloat16",
        allowed="bfloat16, or auto on a GPU",
        hint=f"train.compute_dtype=bfloat16 or {_tensorwise(c)}",
    )


@rule("quant.recipe", "train.local_batch", "train.seq_len", "model.max_seq_len", "parallel", "launch")
def tokens_fill_float8_products(c: Any) -> Problem | None:
    """The weight's gradient is a sum over tokens, a side of a product like any other."""
    recipe = c.quant.recipe
    if recipe in ("none", "float8_rowwise_with_gw_hp") or c.parallel.cp == 0:
        return None
    unit = (32 if recipe == "mxfp8" else 16) * (resolve_degree(c, "cp") or 1)
    batch, seq_len = c.train.local_batch, c.train.seq_len
    if batch * seq_len % unit == 0:
        return None
    lengths = multiples_around(seq_len, unit // math.gcd(unit, batch))
    sizes = range(1, 2 * batch + unit)
    hints = [
        ways("train.seq_len", [length for length in lengths if length <= c.model.max_seq_len]),
        ways("train.local_batch", nearest_numbers(batch, [n for n in sizes if n * seq_len % unit == 0])),
    ]
    return Problem(
        "train.seq_len",
        f"is {seq_len}; with train.local_batch={batch} that is {batch * seq_len} tokens a "
        f"forward, not a multiple of {unit}, as {recipe} needs them",
        allowed=f"local_batch * seq_len a multiple of {unit}",
        hint=" or ".join(hint for hint in hints if hint),
    )


@rule("optim.name", "train.param_dtype")
def narrow_moments_belong_to_float32(c: Any) -> Problem | None:
    if c.optim.name == "adamw" or c.train.param_dtype == "float32":
        return None
    return Problem(
        "optim.name",
        f"is {c.optim.name}, but train.param_dtype is {c.train.param_dtype}",
        allowed="adamw; the others with train.param_dtype=float32",
        hint="optim=adamw or train.param_dtype=float32 train.compute_dtype=auto train.reduce_dtype=float32",
    )


@rule("optim.master", "train", "runner.name", "hardware.memory_gib")
def split_masters_have_bfloat16_weights(c: Any) -> Problem | None:
    """A plan's device need not be here; nor a check's, where ``hardware`` describes one."""
    if c.optim.master != "split":
        return None
    dtype, wide = c.train.compute_dtype, c.train.param_dtype == "float64"
    checked = c.runner.name == "check"
    elsewhere = c.runner.name == "plan" or (checked and c.hardware.memory_gib is not None)
    on_cpu = dtype == "auto" and not elsewhere and not machine.gpus()
    if on_cpu:
        dtype = "auto, which is float32 without a GPU"
    narrow = "train.compute_dtype=bfloat16" + wide * " train.param_dtype=float32 train.reduce_dtype=float32"
    allowed = "float32; split where weights are computed with, and so stored, in bfloat16"
    if dtype not in ("auto", "bfloat16"):
        return Problem(
            "optim.master",
            f"is split, but train.compute_dtype is {dtype}: no weight is stored in bfloat16",
            allowed=allowed,
            hint=f"optim.master=float32 or {narrow}" + " or hardware=h200" * (on_cpu and checked and not wide),
        )
    if wide:
        return Problem(
            "optim.master",
            "is split, but train.param_dtype is float64: 16 bits more than bfloat16 make float32",
            allowed=allowed,
            hint=f"optim.master=float32 or {narrow}",
        )
    return None


@rule("optim.master", "parallel.fsdp_cpu_offload")
def split_masters_are_on_the_device(c: Any) -> Problem | None:
    if c.optim.master != "split" or not c.parallel.fsdp_cpu_offload:
        return None
    return Problem(
        "optim.master",
        "is split, to spare memory of the device, but with parallel.fsdp_cpu_offload "
        "weights and masters are in host memory",
        allowed="float32 with parallel.fsdp_cpu_offload",
        hint="optim.master=float32 or parallel.fsdp_cpu_offload=false",
    )


@rule("optim.master", "quant.fsdp_float8_all_gather", "quant.precompute_scale")
def float8_gather_casts_float32_shards(c: Any) -> Problem | None:
    if c.optim.master != "split" or not c.quant.fsdp_float8_all_gather:
        return None
    return Problem(
        "optim.master",
        "is split, but with quant.fsdp_float8_all_gather the float32 shards are what is cast to float8",
        allowed="float32 where FSDP gathers in float8",
        hint=f"optim.master=float32 or {_no_gather(c)}",
    )
