"""What a run says of itself: log lines at its start and end, ``pipeline.json``, and ``plan`` in status.json."""

import json
import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanyaml import hardware
from titanyaml.config.rules.measure import bench_steps
from titanyaml.config.schema import Config
from titanyaml.data.packing import TokenData
from titanyaml.data.stream import StreamData
from titanyaml.data.windows import PackedData
from titanyaml.distributed.env import Env
from titanyaml.errors import ConfigError
from titanyaml.optim import AdamW
from titanyaml.pipeline import show
from titanyaml.pipeline.protocol import Change, Context, dtype_name
from titanyaml.planner.model import devices, from_config
from titanyaml.planner.model.plan import plan_job
from titanyaml.rundir import RunDir, atomic_write
from titanyaml.runner.setup import Parts, build_loss, global_batch, uses_fused_optimizer

log = logging.getLogger("titanyaml")
#: Planned and measured figures are compared at this step: compilation, caches and clocks have settled.
COMPARED_STEP = 20


def start(config: Config, run: RunDir, env: Env, parts: Parts) -> None:
    """Log what is about to be trained, on what, in which precision; write ``pipeline.json``."""
    built, ctx = parts.built, parts.built.context
    records = show.records(built.resolved, built.changes)
    atomic_write(run.path / "pipeline.json", json.dumps(records, indent=1) + "\n")
    log.info("run %s", run.path)
    num_params, is_default = f"{ctx.facts.num_params:,}", config.train.compute_dtype == "auto"
    reason = f"the default on {env.device.type}" if is_default else "train.compute_dtype"
    compute, reduce = dtype_name(ctx.compute_dtype), dtype_name(ctx.reduce_dtype)
    dtypes = f"compute {compute} ({reason}), master {master_format(config)}, reduce {reduce}"
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    log.info("model %s: %s parameters; %s; %s on %s", config.model.name, num_params, dtypes, ranks, env.device.type)
    for name, change in built.changes:
        log.info("pipeline %s: %s", name, "; ".join([change.summary, *change.left_alone()]))
    for name, off_reason in built.resolved.off.items():
        log.info("pipeline %s: off, %s", name, off_reason)
    kernels = describe_kernels(config, ctx, parts.optimizer)
    listed = "; ".join(f"{operator}: {kernel}" for operator, kernel in kernels.items() if operator != "why")
    log.info("kernels %s (%s)", listed, kernels["why"])
    fields: dict[str, Any] = {**kernels}  # an event's own fields are of any type
    run.event("kernels", listed, **fields)
    sequences, seq_len = global_batch(config, ctx.dims), config.train.seq_len
    batch = f"{sequences * seq_len:,} tokens a step ({sequences} x {seq_len}, accumulation {ctx.accumulation})"
    first_step = parts.last_step + 1
    # a benchmark takes the steps that it measures, whatever train.steps says
    last_step = bench_steps(config.runner) if config.runner.name == "bench" else config.train.steps
    steps = f"steps {first_step} to {last_step}" if first_step <= last_step else "no step is left"
    log.info("data %s: %s; %s; %s", config.data.kind, _size(parts.train_data), batch, steps)


def master_format(config: Config) -> str:
    """The format of the weights that the optimizer updates."""
    is_split = config.optim.master == "split"
    return f"{config.train.param_dtype} split into bfloat16 and 16 bits" if is_split else config.train.param_dtype


def describe_kernels(config: Config, ctx: Context, optimizer: AdamW) -> dict[str, str]:
    """Operator to the kernel that runs, and ``why``."""
    loss = build_loss(config, ctx)
    sharded = f", normalised over {ctx.dims.tp} tp ranks" if ctx.dims.tp > 1 else ""
    return {
        "why": ctx.kernels.reason,
        "cross_entropy": f"{loss.describe()}, {loss.chunk_tokens} tokens a chunk{sharded}",
        config.optim.name: optimizer.describe(),
        "gradient norm": "fused" if uses_fused_optimizer(config, ctx) else "torch",
    }


def add_verified(run: RunDir, changes: Sequence[tuple[str, Change]]) -> None:
    """Add to ``pipeline.json`` what only the first step could show."""
    path = run.path / "pipeline.json"
    records = json.loads(path.read_text())
    for name, change in changes:
        record = next(record for record in records if record["node"] == name)
        record["verified"] = {"summary": change.summary, "modules": change.modules, "skipped": change.skipped}
    atomic_write(path, json.dumps(records, indent=1) + "\n")


def compare_with_plan(config: Config, env: Env, record: dict[str, Any]) -> dict[str, Any] | None:
    """Planned and measured speed and memory (``record``: of metrics.jsonl); None where a device's rates are unknown."""
    if env.device.type == "cpu":
        return None  # also where hardware=... describes another device
    device_rates, links = config.hardware, config.cluster
    if device_rates.name == "auto" and device_rates.gemm_bf16_tflops is None:
        device_rates, links = devices.shipped_device(hardware.detect(env.device) or "auto")
    try:
        expected = plan_job(from_config.job(config, hardware=device_rates, cluster=links))
    except ConfigError:
        return None
    measured = {"tps": record["tps"], "step_s": record["step_s"], "memory_gib": record["mem_reserved_gib"]}
    planned = {"tps": expected.tps, "step_s": expected.step.seconds, "memory_gib": expected.total_gib}
    error = {name: planned[name] / measured[name] - 1 for name in planned}
    return {"step": record["step"], "planned": planned, "measured": measured, "error": error}


def finish(run: RunDir, result: dict[str, Any], *, saved: bool) -> None:
    """Log the last lines: losses, the folder, and what to type next."""
    losses = [f"loss {result['loss']:.4f}"] if "loss" in result else []
    if "validation_loss" in result:
        losses.append(f"validation loss {result['validation_loss']:.4f}")
    log.info("done at step %d: %s", result["step"], ", ".join(losses) or "nothing was left to do")
    log.info("run directory: %s", run.path)
    if saved:
        log.info("sample from it: python -m titanyaml parallel=single runner=sample %s", _checkpoint_override(run.path))


def _size(dataset: TokenData) -> str:
    if isinstance(dataset, StreamData):
        return "a stream"
    return f"{dataset.num_tokens:,} tokens" if isinstance(dataset, PackedData) else "random tokens"


def _checkpoint_override(path: Path) -> str:
    """``runner.checkpoint=...``, quoted for the shell and for Hydra where the path has characters that either reads."""
    if re.fullmatch(r"[\w./:+-]+", str(path)):
        return f"runner.checkpoint={path}"
    return shlex.quote(f'runner.checkpoint="{path}"')
