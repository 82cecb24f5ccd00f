"""Rules of FSDP: options that need several data ranks, a GPU, or gradients that are final when they are reduced."""

import math
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.config.world import resolve_degree, resolve_product, resolve_token_degree
from titanyaml.errors import Problem

rule = RuleTable()

_KEEP_ORDER = "parallel.fsdp_prefetch=null"


def check_prefetch(prefetch: int | None, *, num_layers: int, token_degree: int, pp: int) -> Problem | None:
    """Gathering ahead needs blocks to gather, ranks to gather from and a step that gathers block by block."""
    key = "parallel.fsdp_prefetch"
    if prefetch is None:
        return None
    if pp > 1:
        message = f"is {prefetch}, but a pipeline gathers all weights of a stage before its first microbatch"
        return problem(key, message, "null with parallel.pp above 1", _KEEP_ORDER)
    if token_degree == 1:
        return problem(key, f"is {prefetch}, but one rank gathers no weights", "null", _KEEP_ORDER)
    if 1 <= prefetch < num_layers:
        return None
    highest = f"{key}={num_layers - 1}" if num_layers > 1 else ""
    message = f"is {prefetch}, but the model has {num_layers} blocks"
    return problem(key, message, f"1 .. {num_layers - 1}, or null", highest, _KEEP_ORDER)


@rule("parallel", "launch", "model.num_layers")
def fsdp_prefetch_has_blocks(c: Any) -> Problem | None:
    prefetch = c.parallel.fsdp_prefetch
    if prefetch is None or (token_degree := resolve_token_degree(c)) is None:
        return None
    pp, num_layers = resolve_degree(c, "pp") or 1, c.model.num_layers
    return check_prefetch(prefetch, num_layers=num_layers, token_degree=token_degree, pp=pp)


def check_sharded(name: str, token_degree: int) -> Problem | None:
    """A switch of FSDP that is on needs FSDP: ranks that hold different tokens."""
    if token_degree > 1:
        return None
    message = "is on, but FSDP does it, and one data rank has no FSDP"
    allowed = "true where dp_replicate, dp_shard or cp is above 1"
    return problem(f"parallel.{name}", message, allowed, f"parallel.{name}=false")


def _check_switch(c: Any, name: str, no_gpu: str) -> Problem | None:
    if not getattr(c.parallel, name) or (token_degree := resolve_token_degree(c)) is None:
        return None
    if refusal := check_sharded(name, token_degree):
        return refusal
    if c.runner.name in ("check", "plan") or machine.gpus():  # these two may be of another machine
        return None
    message = f"is on, but there is no GPU here: {no_gpu}"
    return problem(f"parallel.{name}", message, "false on a CPU", f"parallel.{name}=false")


@rule("parallel", "launch", "runner.name")
def cpu_offload_needs_gpu_and_fsdp(c: Any) -> Problem | None:
    return _check_switch(c, "fsdp_cpu_offload", "all memory is host memory")


@rule("parallel", "launch", "runner.name")
def reuse_memory_needs_gpu_and_fsdp(c: Any) -> Problem | None:
    return _check_switch(c, "fsdp_reuse_memory", "a host has no streams with memory of their own")


def check_reuse_memory(
    *, pp: int, cpu_offload: bool, master: str, microbatches: int, param_dtype: str, reduce_dtype: str
) -> Problem | None:
    """What FSDP reduces is at once the step's gradient: the memory that it reuses is not kept for anything else."""
    fix = ""
    if pp > 1:
        obstacle = "parallel.pp is above 1: gradients wait, unsharded, for a stage's last backward pass"
    elif cpu_offload:
        obstacle = "parallel.fsdp_cpu_offload is on: gradients go to host memory"
    elif master == "split":
        obstacle, fix = "optim.master is split: what is kept is the rounded sum", "optim.master=float32"
    elif microbatches > 1:
        obstacle = "train.global_batch takes several backward passes, of which one alone makes the gradient"
    elif reduce_dtype != param_dtype:
        obstacle = f"train.reduce_dtype={reduce_dtype} is not train.param_dtype: what is kept is the converted sum"
        fix = f"train.reduce_dtype={param_dtype}"
    else:
        return None
    allowed = "true with one backward pass a step, pp=1, float32 masters, reduce_dtype=param_dtype and no offloading"
    key = "parallel.fsdp_reuse_memory"
    return problem(key, f"is on, but {obstacle}", allowed, f"{key}=false", fix)


@rule("parallel", "launch", "optim.master", "train")
def reuse_memory_needs_whole_gradients(c: Any) -> Problem | None:
    if not c.parallel.fsdp_reuse_memory:
        return None
    batch, data_degree = c.train.global_batch, resolve_product(c, "dp_replicate", "dp_shard")
    microbatches = math.ceil(batch / (c.train.local_batch * data_degree)) if batch and data_degree else 1
    return check_reuse_memory(
        pp=resolve_degree(c, "pp") or 1,
        cpu_offload=c.parallel.fsdp_cpu_offload,
        master=c.optim.master,
        microbatches=microbatches,
        param_dtype=c.train.param_dtype,
        reduce_dtype=c.train.reduce_dtype,
    )
