"""One job from a composed tree to a claimed run directory that says what will run, and its record afterwards."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from titanyaml import machine
from titanyaml.config import degrees, dump
from titanyaml.config.schema import Config
from titanyaml.launch import resume
from titanyaml.launch.failure import Failure
from titanyaml.rundir import RunDir, atomic_write


@dataclass(frozen=True)
class Typed:
    """What the user chose.

    Args:
        overrides: of the command line. choices: group to option.
    """

    overrides: list[str]
    choices: dict[str, str]


@dataclass(frozen=True)
class Job:
    """A configuration in its run directory, claimed.

    Args:
        config: resolved. run: its folder. run_id: its identity. text: of config.yaml.
        finished: it was done before; nothing is to be run.
    """

    config: Config
    run: RunDir
    run_id: str
    text: str
    finished: bool = False


def world_size(config: Config) -> int:
    """Ranks to start here: ``launch.nproc``, else the mesh's product, else one per GPU, else 1."""
    asked = config.launch.nproc or degrees.mesh_product(config.parallel)
    return asked or len(machine.gpus()) or 1


def global_batch(config: Config, ranks: int) -> int:
    """Sequences per optimizer step on ``ranks`` ranks.

    Raises:
        ConfigError: no mesh of this many ranks satisfies ``parallel``.
    """
    sizes = degrees.resolve_degrees(config.parallel, world_size=ranks)
    return config.train.global_batch or config.train.local_batch * sizes["dp_replicate"] * sizes["dp_shard"]


def open_job(cfg: DictConfig, folder: Path, *, ranks: int, typed: Typed) -> Job:
    """Claim ``folder`` for ``cfg`` and write config.yaml, overrides.yaml, environment.json and status.json there.

    The claim is given back when anything goes wrong, and when the run turns out to be finished.

    Raises:
        ConfigError: the folder holds a run that this configuration cannot go on with.
        LaunchError: somebody else is at work there.
    """
    run = RunDir(folder)
    config, text = dump.to_dataclass(cfg), dump.to_yaml(cfg)
    batch = global_batch(config, ranks)
    run.claim()
    try:
        changes = resume.accept(cfg, config, run, global_batch=batch)
        # a job of a sweep keeps the identity of its first attempt, whenever it is started again
        config.run.id = run.status().get("run_id", config.run.id)
        config.run.dir = str(run.path)
        if resume.is_finished(run, changes, steps=config.train.steps):
            run.release()
            return Job(config, run, config.run.id, text, finished=True)
        if changes:
            lines = [f"{key}: {was!r} -> {now!r}" for key, (was, now) in changes.items()]
            run.event("resumed_with_changes", "; ".join(lines))
        _write_records(run, config, text, typed=typed, ranks=ranks, batch=batch)
    except BaseException:
        run.release()
        raise
    return Job(config, run, config.run.id, text)


def _write_records(run: RunDir, config: Config, text: str, *, typed: Typed, ranks: int, batch: int) -> None:
    atomic_write(run.path / "config.yaml", text)
    atomic_write(run.path / "overrides.yaml", yaml.safe_dump(asdict(typed), sort_keys=False))
    atomic_write(run.path / "environment.json", json.dumps(machine.describe(), indent=2) + "\n")
    run.write_status(
        state="running", run_id=config.run.id, runner=config.runner.name, config_hash=dump.dataclass_hash(config),
        world_size=ranks, global_batch=batch, generation=run.generation, reason=None, error=None, exit_code=None,
    )


def record_failure(run: RunDir, cause: Failure) -> None:
    """Write the end of a failed job."""
    error: dict[str, Any] = {"rank": cause.rank, "type": cause.type, "message": cause.message}
    if cause.traceback:
        error["traceback"] = cause.traceback
    reason = f"{cause.type}: {cause.message.splitlines()[0]}" if cause.message else cause.type
    run.write_status(state="failed", exit_code=cause.exit_code, reason=reason, error=error)
    run.event("failed", reason, rank=cause.rank)
