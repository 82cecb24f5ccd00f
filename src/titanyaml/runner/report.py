"""What a person reads at the start and at the end of a run; and the records that stand beside the metrics."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanyaml.config.rules.measure import bench_steps
from titanyaml.config.schema import Config
from titanyaml.data.packing import TokenData
from titanyaml.data.stream import StreamData
from titanyaml.data.synthetic import SyntheticData
from titanyaml.distributed.env import Env
from titanyaml.pipeline import show
from titanyaml.pipeline.protocol import Change, dtype_name
from titanyaml.rundir import RunDir, atomic_write
from titanyaml.runner import setup

if TYPE_CHECKING:
    from titanyaml.runner.setup import Built

log = logging.getLogger("titanyaml")


def start(
    config: Config,
    run: RunDir,
    env: Env,
    built: Built,
    dataset: TokenData,
    *,
    global_batch: int,
    first_step: int,
    kernels: dict[str, str],
) -> None:
    """Log what is about to be trained, on what, in which precision, and write ``pipeline.json``.

    Args:
        kernels: operator to what runs, and why (``setup.kernels``); also an event of the run.
    """
    ctx = built.context
    records = show.records(built.resolved, built.changes)
    atomic_write(run.path / "pipeline.json", json.dumps(records, indent=1) + "\n")
    why = "train.compute_dtype" if config.train.compute_dtype != "auto" else f"the default on {env.device.type}"
    log.info("run %s", run.path)
    log.info(
        "model %s: %s parameters; %s; %d rank%s on %s",
        config.model.name,
        f"{ctx.facts.num_params:,}",
        f"compute {dtype_name(ctx.compute_dtype)} ({why}), master {setup.master_format(config)}, "
        f"reduce {dtype_name(ctx.reduce_dtype)}",
        env.world_size,
        "" if env.world_size == 1 else "s",
        env.device.type,
    )
    for name, change in built.changes:
        log.info("pipeline %s: %s", name, "; ".join([change.summary, *change.left_alone()]))
    for name, reason in built.resolved.off.items():
        log.info("pipeline %s: off, %s", name, reason)
    chosen = "; ".join(f"{operator}: {kernel}" for operator, kernel in kernels.items() if operator != "why")
    log.info("kernels %s (%s)", chosen, kernels["why"])
    run.event("kernels", chosen, **kernels)
    tokens = global_batch * config.train.seq_len
    last_step = bench_steps(config.runner) if config.runner.name == "bench" else config.train.steps
    left = f"steps {first_step} to {last_step}" if first_step <= last_step else "no step is left"
    log.info(
        "data %s: %s; %s tokens a step (%d x %d, accumulation %d); %s",
        config.data.kind,
        _size(dataset),
        f"{tokens:,}",
        global_batch,
        config.train.seq_len,
        ctx.accumulation,
        left,
    )


def verified(run: RunDir, changes: Sequence[tuple[str, Change]]) -> None:
    """Add to ``pipeline.json`` what only the first step could show."""
    path = run.path / "pipeline.json"
    records = json.loads(path.read_text())
    for name, change in changes:
        record = next(record for record in records if record["node"] == name)
        record["verified"] = {"summary": change.summary, "modules": change.modules, "skipped": change.skipped}
    atomic_write(path, json.dumps(records, indent=1) + "\n")


def finish(run: RunDir, result: dict[str, Any], *, saved: bool) -> None:
    """The last lines: losses, the folder, and what to type next."""
    losses = [f"loss {result['loss']:.4f}"] if "loss" in result else []
    if "validation_loss" in result:
        losses.append(f"validation loss {result['validation_loss']:.4f}")
    log.info("done at step %d: %s", result["step"], ", ".join(losses) or "nothing was left to do")
    log.info("run directory: %s", run.path)
    if saved:
        log.info("sample from it: python -m titanyaml parallel=single runner=sample %s", _typed(run.path))


def _size(dataset: TokenData) -> str:
    if isinstance(dataset, StreamData):
        return "a stream"
    return "random tokens" if isinstance(dataset, SyntheticData) else f"{dataset.num_tokens:,} tokens"


def _typed(path: Path) -> str:
    """The override that names a folder, quoted for the shell and for Hydra where it must be."""
    if re.fullmatch(r"[\w./:+-]+", str(path)):
        return f"runner.checkpoint={path}"
    return shlex.quote(f'runner.checkpoint="{path}"')
