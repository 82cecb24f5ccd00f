"""Rules of float8 and mxfp8 training: the device multiplies in it, some layer is converted, operands are aligned."""

import math
from typing import Any

from titanyaml import machine
from titanyaml.config import decoder_layers
from titanyaml.config.rules.hints import reset_nproc, with_resets
from titanyaml.config.rules.view import RuleTable, multiples_around, nearest_numbers, problem, settings
from titanyaml.config.world import has_gpu, only_shipped_plugins, resolve_degree
from titanyaml.errors import Problem

rule = RuleTable()

#: CUDA compute capability of the devices in conf/hardware.
_DEVICES = {
    8.0: ("a100_40gb", "a100_80gb"),
    9.0: ("h100_sxm", "h100_500w", "h100_pcie", "h200", "gh200"),
    10.0: ("b200",),
}
CAPABILITY = {device: capability for capability, devices in _DEVICES.items() for device in devices}
#: Ada (8.9) is the first with float8 tensor cores, Blackwell (10.0) the first with scales per 32 numbers.
_FLOAT8_CAPABILITY, _MX_CAPABILITY = 8.9, 10.0


def _use_none(c: Any) -> str:
    return with_resets(c, "quant=none", recipe="none")


def _use_tensorwise(c: Any) -> str:
    return with_resets(c, "quant=float8_tensorwise", recipe="float8_tensorwise")


def _use_torchao(c: Any) -> str:
    """The override for torchao's GEMMs, with resets of what only ours read."""
    fast_accum = "" if c.quant.fast_accum is None else " quant.fast_accum=null"
    grad_dtype = "" if c.quant.grad_dtype == "auto" else " quant.grad_dtype=auto"
    return f"quant.product=torchao{fast_accum}{grad_dtype}"


def _gather_high_precision(c: Any) -> str:
    precompute = " quant.precompute_scale=false" if c.quant.precompute_scale else ""
    return f"quant.fsdp_float8_all_gather=false{precompute}"


def check_capability(recipe: str, capability: float | None, device: str, *fixes: str) -> Problem | None:
    """The device multiplies in the recipe's format.

    Args:
        capability: CUDA compute capability; None: the device is no GPU. device: what the message calls it.
    """
    required = _MX_CAPABILITY if recipe == "mxfp8" else _FLOAT8_CAPABILITY
    if capability is not None and capability >= required:
        return None
    lack = "has no fast float8 matmuls" if capability is None else f"has compute capability {capability:g}"
    allowed = f"a GPU of compute capability {required:g} or higher"
    return problem("quant.recipe", f"is {recipe}, but {device} {lack}", allowed, *fixes)


@rule("quant", "hardware.name", "runner.name")
def quant_needs_a_device_that_multiplies(c: Any) -> Problem | None:
    recipe, hardware = c.quant.recipe, c.hardware.name
    if recipe == "none" or c.quant.emulate:
        return None
    # emulation and the short accumulator exclude each other (emulation_excludes_fast_accum)
    emulated = "quant.emulate=true quant.fast_accum=null" if c.quant.fast_accum else "quant.emulate=true"
    if c.quant.product == "own" and c.runner.name != "plan" and machine.gpus():
        emulated = f"quant.emulate=true {_use_torchao(c)}"  # ours emulate on a CPU only
    capability, device = CAPABILITY.get(hardware), f"hardware={hardware}"
    if capability is not None and check_capability(recipe, capability, device):
        return check_capability(recipe, capability, device, emulated, _use_none(c))
    if has_gpu(c):
        return None  # a GPU that hardware.name does not name: the plugin asks the device itself
    return check_capability(recipe, None, "this machine, without a GPU,", emulated, _use_none(c))


def check_own_emulation(product: str, emulate: bool, *, on_gpu: bool, fix: str = "") -> Problem | None:
    """Own GEMMs are emulated on a CPU only."""
    if product != "own" or not emulate or not on_gpu:
        return None
    message = "is true, but quant.product=own emulates on a CPU only, and there is a GPU here"
    fixes = ("quant.emulate=false", fix or "quant.product=torchao")
    return problem("quant.emulate", message, "false with quant.product=own", *fixes)


@rule("quant.product", "quant.emulate", "runner.name")
def own_emulation_needs_cpu(c: Any) -> Problem | None:
    if c.quant.product != "own" or not c.quant.emulate or c.runner.name == "plan":
        return None
    return check_own_emulation(c.quant.product, c.quant.emulate, on_gpu=bool(machine.gpus()), fix=_use_torchao(c))


@rule("quant.product", "quant.fsdp_float8_all_gather", "parallel.fsdp_cpu_offload")
def own_float8_gather_excludes_cpu_offload(c: Any) -> Problem | None:
    if c.quant.product != "own" or not c.quant.fsdp_float8_all_gather or not c.parallel.fsdp_cpu_offload:
        return None
    copies = "float8 copies of the shards lie on the device"
    weights = "parallel.fsdp_cpu_offload is true: the weights they are made of lie in host memory"
    fixes = (_use_torchao(c), _gather_high_precision(c), "parallel.fsdp_cpu_offload=false")
    return problem("quant.product", f"is own, whose {copies}, but {weights}", "torchao with both", *fixes)


@rule("quant.fast_accum", "quant.emulate")
def emulation_excludes_fast_accum(c: Any) -> Problem | None:
    if not (c.quant.fast_accum and c.quant.emulate):
        return None
    message = "is true, but quant.emulate=true multiplies in float32: it would change nothing"
    return problem("quant.fast_accum", message, "false or null with emulation", "quant.fast_accum=null")


@rule("quant.recipe", "quant.fsdp_float8_all_gather")
def float8_gather_needs_tensorwise(c: Any) -> Problem | None:
    key, recipe = "quant.fsdp_float8_all_gather", c.quant.recipe
    if not c.quant.fsdp_float8_all_gather or recipe in ("none", "float8_tensorwise"):
        return None
    reason = "casts a weight along both of its sides: the gathered bytes would serve one of them"
    fixes = (_gather_high_precision(c), _use_tensorwise(c))
    return problem(key, f"is true with {recipe}, which {reason}", "quant=float8_tensorwise", *fixes)


@rule("quant.fsdp_float8_all_gather", "parallel", "launch")
def float8_gather_needs_shards(c: Any) -> Problem | None:
    # cp ranks are FSDP ranks too: weights are sharded over dp_shard*cp
    if not c.quant.fsdp_float8_all_gather or (resolve_degree(c, "dp_shard"), resolve_degree(c, "cp")) != (1, 1):
        return None
    message = "is true, but parallel.dp_shard is 1: nothing is gathered"
    fixes = (_gather_high_precision(c), f"parallel=fsdp2{reset_nproc(c)}")
    return problem("quant.fsdp_float8_all_gather", message, "parallel.dp_shard of 2 or more", *fixes)


@rule("quant.fsdp_float8_all_gather", "quant.force_recompute_weight")
def float8_gather_keeps_no_copy(c: Any) -> Problem | None:
    key = "quant.force_recompute_weight"
    if not c.quant.fsdp_float8_all_gather or c.quant.force_recompute_weight:
        return None
    message = "is false, but weights come in float8 from quant.fsdp_float8_all_gather: there is no copy to keep"
    return problem(key, message, "true", f"{key}=true", _gather_high_precision(c))


@rule("quant.recipe", "quant.product", "quant.force_recompute_weight")
def kept_float8_weights_need_one_scale(c: Any) -> Problem | None:
    key, recipe = "quant.force_recompute_weight", c.quant.recipe
    if c.quant.force_recompute_weight or c.quant.product == "own" or recipe in ("none", "float8_tensorwise"):
        return None
    message = f"is false with {recipe}, where torchao casts a weight along another side in the backward pass"
    return problem(key, message, "true; false with own or tensorwise", f"{key}=true", "quant.product=own")


@rule("quant.product", "quant.force_recompute_weight", "compile.mode", "runner.name")
def kept_float8_weights_exclude_compile(c: Any) -> Problem | None:
    key, mode = "quant.force_recompute_weight", c.compile.mode
    if c.quant.force_recompute_weight or c.quant.product == "own" or "none" in (c.quant.recipe, mode):
        return None
    if mode == "auto" and not has_gpu(c):  # auto compiles on a GPU only
        return None
    message = "is false, but with torchao's products a compiled graph casts each weight again in any case"
    return problem(key, message, "true; false with own, or with compile=none", f"{key}=true", "quant.product=own")


@rule("quant.filter_fqns", "model", "pipeline.plugins")
def filter_fqns_name_modules(c: Any) -> Problem | None:
    # a plugin that does not ship may bring modules with other names: then the node checks them
    if not c.quant.filter_fqns or not only_shipped_plugins(c):
        return None
    example = next(iter(decoder_layers.linear_layers(c.model)))
    return decoder_layers.check_filters(c.quant.filter_fqns, decoder_layers.module_names(c.model), example=example)


@rule("quant", "model", "parallel", "launch", "pipeline.plugins")
def quant_converts_a_layer(c: Any) -> Problem | None:
    recipe, tp = c.quant.recipe, resolve_degree(c, "tp")
    if recipe == "none" or not tp or not only_shipped_plugins(c):
        return None
    # what a tp rank multiplies decides; one layer of each reason is named
    sizes = {name: linear.local(tp) for name, linear in decoder_layers.linear_layers(c.model).items()}
    reasons = {
        decoder_layers.reason_for_high_precision(c.quant, name, n, k, tp=tp): name for name, (k, n) in sizes.items()
    }
    if "" in reasons:
        return None
    explained = "; ".join(f"{name}: {reason}" for reason, name in reasons.items())
    filters = ["quant.auto_filter_small_kn=false"] if c.quant.auto_filter_small_kn else []
    filters += ["quant.filter_fqns=[]"] if c.quant.filter_fqns else []
    # without the filters some layer is converted only if one has both dimensions aligned
    unit = decoder_layers.ALIGNMENT[recipe]
    is_aligned = any(n % unit == k % unit == 0 for k, n in sizes.values())
    unfiltered = " ".join(filters) if is_aligned else ""
    message = f"is {recipe}, but no layer can be converted: {explained}"
    return problem("quant.recipe", message, "", unfiltered, _use_none(c))


@rule("quant.recipe", "train.compute_dtype")
def quant_excludes_float64(c: Any) -> Problem | None:
    if c.quant.recipe == "none" or c.train.compute_dtype != "float64":
        return None
    message = f"is {c.quant.recipe}, but train.compute_dtype is float64, which is for exact comparisons"
    narrow = "train.compute_dtype=auto train.param_dtype=float32 train.reduce_dtype=float32"
    return problem("quant.recipe", message, "none with float64", _use_none(c), narrow)


@rule("quant", "train.compute_dtype")
def rowwise_matmuls_exclude_float32(c: Any) -> Problem | None:
    recipe = c.quant.recipe
    if recipe in ("none", "float8_tensorwise") or c.quant.emulate or c.train.compute_dtype != "float32":
        return None
    # torch._scaled_mm writes bfloat16 only where its scales are per row or block
    message = f"is float32, but a product in {recipe} comes out in bfloat16"
    fixes = ("train.compute_dtype=bfloat16", _use_tensorwise(c))
    return problem("train.compute_dtype", message, "bfloat16, or auto on a GPU", *fixes)


@rule("quant.recipe", "train.local_batch", "train.seq_len", "model.max_seq_len", "parallel", "launch")
def tokens_are_aligned_for_float8(c: Any) -> Problem | None:
    # The weight's gradient is a sum over tokens, so their number is a dimension of a float8 GEMM like any other. In
    # float8_rowwise_with_gw_hp that GEMM is in high precision.
    recipe = c.quant.recipe
    if recipe in ("none", "float8_rowwise_with_gw_hp") or c.parallel.cp == 0:
        return None
    unit = decoder_layers.ALIGNMENT[recipe] * (resolve_degree(c, "cp") or 1)
    batch, seq_len = c.train.local_batch, c.train.seq_len
    if batch * seq_len % unit == 0:
        return None
    lengths = multiples_around(seq_len, unit // math.gcd(unit, batch))
    batches = nearest_numbers(batch, [n for n in range(1, 2 * batch + unit) if n * seq_len % unit == 0])
    tokens = f"with train.local_batch={batch} that is {batch * seq_len} tokens a forward"
    message = f"is {seq_len}; {tokens}, not a multiple of {unit}, as {recipe} needs them"
    fixes = (
        settings("train.seq_len", [length for length in lengths if length <= c.model.max_seq_len]),
        settings("train.local_batch", batches),
    )
    return problem("train.seq_len", message, f"local_batch * seq_len a multiple of {unit}", *fixes)
