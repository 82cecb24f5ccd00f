"""Rules on the mesh, the ranks and the batches and memory that they share."""

import math
from typing import Any

from titanyaml.config import optimizer_state
from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.degrees import AXES, check_derived, check_num_ranks
from titanyaml.config.rules.hints import reset_nproc, use_one_rank
from titanyaml.config.rules.view import RuleTable, offer_multiples, problem
from titanyaml.config.world import count_ranks, fixed_product
from titanyaml.errors import Problem

rule = RuleTable()


@rule("parallel")
def degrees_are_not_zero(c: Any) -> Problem | None:
    axis = next((axis for axis in AXES if getattr(c.parallel, axis) == 0), "")
    # the schema's bound is -1, which means derived: 0 is within it
    return None if not axis else problem(f"parallel.{axis}", "is 0", "1 or more; -1: derived", f"parallel.{axis}=1")


@rule("parallel")
def only_one_degree_is_derived(c: Any) -> Problem | None:
    return check_derived(c.parallel)


@rule("parallel", "launch.kind", "launch.nproc")
def mesh_fits_ranks(c: Any) -> Problem | None:
    fixed, derived = fixed_product(c.parallel)
    if fixed < 1 or (derived and fixed == 1):
        return None  # fits any number of ranks; counting GPUs takes time
    ranks = count_ranks(c)
    return None if ranks is None else check_num_ranks(c.parallel, ranks, fixed_ranks=c.launch.kind == "external")


@rule("train.global_batch", "train.local_batch", "parallel", "launch")
def data_ranks_divide_global_batch(c: Any) -> Problem | None:
    batch, local = c.train.global_batch, c.train.local_batch
    if batch is None:
        return None
    fixed, derived = fixed_product(c.parallel)
    ranks = count_ranks(c)
    if fixed < 1 or ranks is None or ranks % fixed:
        return None  # another rule speaks
    degree = c.parallel.dp_replicate * c.parallel.dp_shard
    if derived in ("dp_replicate", "dp_shard"):
        degree = -degree * (ranks // fixed)  # the derived degree is the factor -1
    unit = local * degree
    if batch % unit == 0:
        return None
    plural = "s" if degree > 1 else ""
    message = f"is {batch}, not a multiple of train.local_batch={local} * {degree} data rank{plural}"
    fixes = offer_multiples("train.global_batch", batch, unit)
    return problem("train.global_batch", message, f"multiples of {unit}, or null", fixes)


@rule("runner.name", "parallel", "launch")
def sample_needs_one_rank(c: Any) -> Problem | None:
    if c.runner.name != "sample" or (ranks := count_ranks(c)) in (1, None):
        return None
    return problem("parallel", f"runner=sample runs on one rank, not {ranks}", "", use_one_rank(c))


@rule("model", "parallel", "hardware.memory_gib", "runner.name", "train.param_dtype", "optim.name")
def state_fits_memory(c: Any) -> Problem | None:
    # a lower bound: master weights, their gradients and the two moments; activations come on top
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
    # meshes of the hint are powers of two, as machines are
    enough = 2 ** math.ceil(math.log2(total / c.hardware.memory_gib))
    plural = "s" if shards > 1 else ""
    needs = f"need {total / shards:.1f} GiB on each of {shards} shard{plural}"
    message = f"is {c.hardware.memory_gib:g}, but weights, gradients and moments alone {needs}"
    allowed = f"{math.ceil(total / c.hardware.memory_gib)} shards or more"
    return problem("hardware.memory_gib", message, allowed, f"parallel=fsdp{enough}{reset_nproc(c)}")
