"""Rules on the mesh, the ranks and the batches that they share."""

from __future__ import annotations

import math
from typing import Any

from titanyaml import machine
from titanyaml.config import optimizer_state
from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.degrees import AXES
from titanyaml.config.rules.view import Rule, into, multiples_around, ways
from titanyaml.config.world import count_ranks, fixed_product, has_plugin_for, resolve_degree
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


@rule("parallel")
def degrees_are_sizes(c: Any) -> Problem | None:
    zero = [axis for axis in AXES if getattr(c.parallel, axis) == 0]
    if not zero:
        return None
    return Problem(f"parallel.{zero[0]}", "is 0", allowed="1 or more; -1: derived", hint=f"parallel.{zero[0]}=1")


@rule("parallel")
def one_degree_is_derived(c: Any) -> Problem | None:
    derived = [axis for axis in AXES if getattr(c.parallel, axis) == -1]
    if len(derived) < 2:
        return None
    alternatives = [" ".join(f"parallel.{other}=1" for other in derived if other != axis) for axis in derived]
    return Problem(
        f"parallel.{derived[1]}",
        f"{' and '.join(derived)} are -1; only one can be derived",
        hint=" or ".join(alternatives),
    )


@rule("parallel", "launch.kind", "launch.nproc")
def mesh_fits_ranks(c: Any) -> Problem | None:
    fixed, derived = fixed_product(c.parallel)
    if fixed < 1 or (derived and fixed == 1):
        return None  # fits any number; counting GPUs takes time
    ranks = count_ranks(c)
    if ranks is None or (ranks % fixed == 0 if derived else ranks == fixed):
        return None
    if derived:
        return Problem(
            f"parallel.{derived}",
            f"is -1, but {ranks} rank{'s' * (ranks > 1)} cannot be divided by the {fixed} of the other degrees",
            allowed=f"ranks that are a multiple of {fixed}",
            hint=ways("launch.nproc", multiples_around(ranks, fixed)),
        )
    # what torchrun started cannot be changed from here, what the launcher starts can
    hints = ["parallel=auto"] if c.launch.kind == "external" else [f"launch.nproc={fixed}", "parallel=auto"]
    return Problem("parallel", f"the mesh needs {fixed} ranks, but {ranks} are started", hint=" or ".join(hints))


@rule("train.global_batch", "train.local_batch", "parallel", "launch")
def global_batch_is_whole(c: Any) -> Problem | None:
    batch, local = c.train.global_batch, c.train.local_batch
    if batch is None:
        return None
    fixed, derived = fixed_product(c.parallel)
    ranks = count_ranks(c)
    if fixed < 1 or ranks is None or ranks % fixed:
        return None  # another rule speaks
    degree = c.parallel.dp_replicate * c.parallel.dp_shard
    if derived in ("dp_replicate", "dp_shard"):
        degree = -degree * (ranks // fixed)
    unit = local * degree
    if batch % unit == 0:
        return None
    return Problem(
        "train.global_batch",
        f"is {batch}, not a multiple of train.local_batch={local} * {degree} data rank{'s' * (degree > 1)}",
        allowed=f"multiples of {unit}, or null",
        hint=ways("train.global_batch", multiples_around(batch, unit)),
    )


@rule("parallel", "launch", "pipeline.plugins")
def data_ranks_share_gradients(c: Any) -> Problem | None:
    """Without a plugin that sums gradients each rank would silently train a model of its own."""
    ranks = (count_ranks(c) or 1) // max((resolve_degree(c, "tp") or 1) * (resolve_degree(c, "pp") or 1), 1)
    if has_plugin_for(c, "fsdp") or ranks <= 1:
        return None
    return Problem(
        "pipeline.plugins.fsdp",
        f"is off, but {ranks} ranks share the data: nothing would sum their gradients",
        allowed="titanyaml.plugins.fsdp.FullyShard, or a plugin of yours in its place",
        hint="parallel=single" + (" launch.nproc=1" if c.launch.nproc else ""),
    )


@rule("runner.name", "parallel", "launch")
def sample_runs_alone(c: Any) -> Problem | None:
    if c.runner.name != "sample" or count_ranks(c) in (1, None):
        return None
    return Problem(
        "parallel",
        f"runner=sample runs on one rank, not {count_ranks(c)}",
        hint="parallel=single" + (" launch.nproc=1" if c.launch.nproc else ""),
    )


@rule("parallel", "launch", "compile.mode")
def whole_model_is_one_graph(c: Any) -> Problem | None:
    """Gathering weights breaks it."""
    ranks = sharing_ranks(c)
    if c.compile.mode != "model" or ranks in (None, 1):
        return None
    return Problem(
        "compile.mode",
        f"is model, but FSDP gathers weights over {ranks} ranks in the middle of it (dp_replicate*dp_shard*cp)",
        allowed="block, none; model on one such rank",
        hint="compile.mode=block or compile.mode=none",
    )


@rule("parallel", "launch", "model.num_layers")
def gathering_ahead_has_blocks(c: Any) -> Problem | None:
    ahead, layers, ranks = c.parallel.fsdp_prefetch, c.model.num_layers, sharing_ranks(c)
    if ahead is None or ranks is None or (1 <= ahead < layers and ranks > 1):
        return None
    if ranks == 1:
        return Problem(
            "parallel.fsdp_prefetch",
            f"is {ahead}, but one rank gathers no weights",
            allowed="null",
            hint="parallel.fsdp_prefetch=null",
        )
    nearest = [f"parallel.fsdp_prefetch={layers - 1}"] if layers > 1 else []
    return Problem(
        "parallel.fsdp_prefetch",
        f"is {ahead}, but the model has {layers} blocks",
        allowed=f"1 .. {layers - 1}, or null",
        hint=" or ".join([*nearest, "parallel.fsdp_prefetch=null"]),
    )


@rule("parallel", "launch", "runner.name")
def offload_has_a_device(c: Any) -> Problem | None:
    return _fsdp_on_a_gpu(c, "fsdp_cpu_offload", "all memory is host memory")


@rule("parallel", "launch", "runner.name")
def freed_memory_is_a_devices(c: Any) -> Problem | None:
    return _fsdp_on_a_gpu(c, "fsdp_reuse_memory", "a host has no streams with memory of their own")


def _fsdp_on_a_gpu(c: Any, name: str, why: str) -> Problem | None:
    """What is wrong where a switch of FSDP is on, and there is no FSDP or no GPU."""
    if not getattr(c.parallel, name) or (ranks := sharing_ranks(c)) is None:
        return None
    off = f"parallel.{name}=false"
    if ranks == 1:
        return Problem(
            f"parallel.{name}",
            "is on, but FSDP does it, and one data rank has no FSDP",
            allowed="true where dp_replicate, dp_shard or cp is above 1",
            hint=off,
        )
    if c.runner.name in ("check", "plan") or machine.gpus():
        return None
    return Problem(f"parallel.{name}", f"is on, but there is no GPU here: {why}", allowed="false on a CPU", hint=off)


@rule("parallel", "launch", "optim.master", "train.global_batch", "train.local_batch")
def freed_memory_takes_whole_gradients(c: Any) -> Problem | None:
    if not c.parallel.fsdp_reuse_memory:
        return None
    off, batch = "parallel.fsdp_reuse_memory=false", c.train.global_batch
    ranks = [resolve_degree(c, axis) for axis in ("dp_replicate", "dp_shard")]
    if (resolve_degree(c, "pp") or 1) > 1:
        why, hint = "parallel.pp is above 1: gradients wait, unsharded, for a stage's last backward pass", off
    elif c.parallel.fsdp_cpu_offload:
        why, hint = "parallel.fsdp_cpu_offload is on: gradients go to host memory", off
    elif c.optim.master == "split":
        why, hint = "optim.master is split: what is kept is the rounded sum", f"{off} or optim.master=float32"
    elif batch is not None and None not in ranks and batch > c.train.local_batch * math.prod(ranks):
        why, hint = "train.global_batch takes several backward passes, of which one alone makes the gradient", off
    else:
        return None
    return Problem(
        "parallel.fsdp_reuse_memory",
        f"is on, but {why}",
        hint=hint,
        allowed="true with one backward pass a step, pp=1, float32 masters and no offloading",
    )


def sharing_ranks(c: Any) -> int | None:
    """Ranks that hold different tokens; None where it cannot be known."""
    degrees = [resolve_degree(c, axis) for axis in ("dp_replicate", "dp_shard", "cp")]
    return None if None in degrees or 0 in degrees else math.prod(degrees)


@rule("model", "parallel", "hardware.memory_gib", "runner.name", "train.param_dtype", "optim.name")
def state_fits_memory(c: Any) -> Problem | None:
    """A lower bound: master weights, their gradients and the two moments; activations come on top."""
    fixed, derived = fixed_product(c.parallel)
    if c.hardware.memory_gib is None or c.runner.name not in ("train", "check", "bench") or fixed < 1:
        return None
    ranks = count_ranks(c) if derived else fixed
    if ranks is None or derived == "dp_replicate" or ranks % fixed:
        return None  # unknown, or another rule speaks
    shards = ranks // c.parallel.dp_replicate
    size = 8 if c.train.param_dtype == "float64" else 4
    param_bytes = 2 * size + optimizer_state.moment_bytes(c.optim.name, param_bytes=size)
    total = param_bytes * DecoderShape.of(c.model).num_params / 2**30
    if total / shards <= c.hardware.memory_gib:
        return None
    enough = 2 ** math.ceil(math.log2(total / c.hardware.memory_gib))
    return Problem(
        "hardware.memory_gib",
        f"is {c.hardware.memory_gib:g}, but weights, gradients and moments alone "
        f"need {total / shards:.1f} GiB on each of {shards} shard{'s' * (shards > 1)}",
        allowed=f"{math.ceil(total / c.hardware.memory_gib)} shards or more",
        hint=f"parallel=fsdp{enough}" + (" launch.nproc=null" if c.launch.nproc else ""),
    )
