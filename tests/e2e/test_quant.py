"""A run with float8 weights on the wire and 8-bit moments: two ranks, stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from tests.e2e.helpers import SIZES, metrics
from tests.e2e.test_parity import begin
from tests.ranks import run_ranks
from titanyaml import float8
from titanyaml.config import dump
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.rundir import RunDir
from titanyaml.runner.train import train

FLOAT8 = (
    "quant=float8_tensorwise",
    "quant.emulate=true",
    "quant.fsdp_float8_all_gather=true",
    "quant.precompute_scale=true",
    "optim=adamw_8bit",
    "parallel=fsdp2",
)


def body(rank: int, config: Config, folder: Path, generation: int) -> int:
    """Train on this rank; how often scales were computed."""
    calls, inner = [], float8.precompute_scales
    float8.precompute_scales = lambda weights: calls.append(len(weights)) or inner(weights)
    try:
        train(config, RunDir(folder, generation=generation), Env.from_environ("cpu"))
    finally:
        float8.precompute_scales = inner
    assert set(calls) == {7 * config.model.num_layers}
    return len(calls)


def go(config: Config, folder: Path, *, steps: int) -> RunDir:
    run = begin(config, folder)
    assert run_ranks(body, 2, config, run.path, run.generation) == [steps, steps]
    run.release()
    return run


def test_a_resumed_run_is_the_run(
    compose: Callable[..., DictConfig], corpus: Path, cache: Path, tmp_path: Path
) -> None:
    text = ("data=files", f"data.paths=[{corpus}]", f"data.cache_dir={cache}")
    common = (*text, *SIZES, *FLOAT8, "schedule=constant", "optim.lr=1e-3", "validation=none", "checkpoint.interval=2")
    long, short = (dump.to_dataclass(compose(*common, f"train.steps={steps}")) for steps in (4, 2))
    straight = go(long, tmp_path / "whole", steps=4)
    go(short, tmp_path / "parts", steps=2)
    parts = go(long, tmp_path / "parts", steps=2)
    assert metrics(parts.path) == metrics(straight.path) and len(metrics(straight.path)) == 4
    changes = {record["node"]: record for record in json.loads((straight.path / "pipeline.json").read_text())}
    assert "FSDP gathers them in float8, scales precomputed" in changes["quant"]["summary"]
