"""``ac=auto`` becomes a concrete mode before the pipeline is built, and is told wherever a run is described.

config.yaml keeps what was asked, so that a replay elsewhere decides anew; its first lines, ``status.json`` and the log
say what was chosen.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from titanyaml import hardware
from titanyaml.config import schema
from titanyaml.config.schema import Config
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env
from titanyaml.planner.model import devices, from_config
from titanyaml.planner.search import choose_ac as planned
from titanyaml.planner.search import remedies
from titanyaml.planner.search.choose_ac import Choice
from titanyaml.rundir import RunDir, atomic_write

log = logging.getLogger("titanyaml")


def settle(config: Config, env: Env) -> tuple[Config, Choice | None]:
    """``config`` with a concrete mode, and how it was chosen; as it is where ``ac.mode`` is not auto.

    The limit is the smallest device's, so that all ranks decide alike. A check decides for ``hardware``, where that is
    given.

    Raises:
        ConfigError: nothing fits, or nothing is known that it could have to fit into.
    """
    if config.ac.mode != "auto":
        return config, None
    spec, links = _device(config, env)
    device_gib = config.hardware.memory_gib
    if env.device.type == "cuda" and (device_gib is None or config.runner.name != "check"):
        mine = torch.cuda.get_device_properties(env.device).total_memory / hardware.GIB
        device_gib = min(comm.gather_objects(mine, env))
    limit_gib, why = planned.limit(config, device_gib=device_gib, reserve_gib=config.hardware.reserve_gib)
    job = from_config.job(_as_it_runs(config, env), hardware=spec, cluster=links)
    choice = planned.choose(config, job, limit_gib=limit_gib, why=why)
    settled = planned.concrete(config, choice)
    if not choice.fits:
        ways = remedies.changes(settled, choice.plan, limit_gib=choice.limit_gib, hardware=spec, cluster=links).found
        raise planned.refusal(choice, ways)
    return settled, choice


def tell(choice: Choice | None, run: RunDir, env: Env) -> None:
    """Log it, put it into status.json and above the lines of config.yaml."""
    if choice is None or not env.is_main:
        return
    log.info("%s", choice.sentence())
    run.write_status(ac=choice.record())
    path = run.path / "config.yaml"
    if path.exists():
        atomic_write(path, f"# {choice.sentence()}\n{path.read_text(encoding='utf-8')}")


def _device(config: Config, env: Env) -> tuple[schema.Hardware, schema.Cluster]:
    """Rates and links for the order of the ways: as configured, else of the device here, else of an H200."""
    spec, links = config.hardware, config.cluster
    if spec.gemm_bf16_tflops is None:
        option = hardware.detect(env.device) if spec.name == "auto" and env.device.type == "cuda" else None
        spec, known = devices.shipped_device(option or "h200")
        links = known if links.nvlink_gb_s is None else links
    elif links.nvlink_gb_s is None:
        links = devices.shipped_device("h200")[1]
    return spec, links


def _as_it_runs(config: Config, env: Env) -> Config:
    """``auto`` as it is meant here: on a CPU nothing is compiled; and where no other device is described, it computes
    in float32 with plain PyTorch's kernels."""
    if env.device.type == "cuda":
        return config
    compiles = "none" if config.compile.mode == "auto" else config.compile.mode
    made = replace(config, compile=replace(config.compile, mode=compiles))
    if config.hardware.memory_gib is not None:
        return made
    dtype = "float32" if config.train.compute_dtype == "auto" else config.train.compute_dtype
    return replace(
        made, kernels=replace(config.kernels, name="torch"), train=replace(config.train, compute_dtype=dtype)
    )
