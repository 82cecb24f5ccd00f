"""One job from a composed tree to a claimed run directory that says what will run, and its record afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from titanyaml import machine
from titanyaml.config import degrees, dump
from titanyaml.config.ranks import world_size as count_ranks
from titanyaml.config.schema import Config
from titanyaml.errors import TitanError
from titanyaml.launch import failure, local, resume
from titanyaml.launch.failure import Failure
from titanyaml.launch.local import Outcome
from titanyaml.rundir import RunDir, atomic_write, utc_now


@dataclass(frozen=True)
class Typed:
    """What the user chose.

    Args:
        overrides: of the command line. choices: group to option. sweep: whether this is one job of a sweep.
    """

    overrides: list[str]
    choices: dict[str, str]
    sweep: bool = False


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


def global_batch(config: Config, ranks: int | None) -> int:
    """Sequences per optimizer step on ``ranks`` ranks.

    Raises:
        ConfigError: no mesh of this many ranks satisfies ``parallel``.
    """
    return degrees.global_batch(config, degrees.resolve_degrees(config.parallel, world_size=ranks))


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
    resume.refuse_what_the_checkpoint_brings(config, typed.overrides)
    run.claim()
    try:
        changes = resume.accept(cfg, config, run, global_batch=batch)
        # jobs of a sweep share Hydra's clock, so the folder tells them apart; each keeps its first identity
        new_id = f"{config.run.id}-{run.path.name}" if typed.sweep else config.run.id
        config.run.id = run.status().get("run_id", new_id)
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
    write_typed(run, typed)
    atomic_write(run.path / "environment.json", json.dumps(machine.describe(), indent=2) + "\n")
    run.write_status(
        state="running",
        run_id=config.run.id,
        runner=config.runner.name,
        config_hash=dump.dataclass_hash(config),
        world_size=ranks,
        global_batch=batch,
        generation=run.generation,
        reason=None,
        error=None,
        exit_code=None,
        started=run.status().get("started", utc_now()),
    )


def write_typed(run: RunDir, typed: Typed) -> None:
    """Write overrides.yaml."""
    chosen = {"overrides": typed.overrides, "choices": typed.choices}
    atomic_write(run.path / "overrides.yaml", yaml.safe_dump(chosen, sort_keys=False))


def run_local(cfg: DictConfig, folder: Path, typed: Typed) -> tuple[Job, Outcome | None]:
    """Run ``cfg`` on ranks of this machine; no outcome where the run was finished before.

    Raises:
        ConfigError, LaunchError: the job was not started.
    """
    ranks = count_ranks(dump.to_dataclass(cfg))
    local.check_devices(ranks)
    job = open_job(cfg, folder, ranks=ranks, typed=typed)
    if job.finished:
        return job, None
    try:
        outcome = local.launch(job.run, run_id=job.run_id, nproc=ranks, launch=job.config.launch)
        _record(job.run, outcome)
    finally:
        job.run.release()
    return job, outcome


def _record(run: RunDir, outcome: Outcome) -> None:
    """Write what rank 0 could not: done and preempted are its own word."""
    if outcome.failure is not None:
        record_failure(run, outcome.failure)
    elif outcome.state == "stopped":
        reason = f"{outcome.signal}, before the ranks had saved"
        run.write_status(state="stopped", exit_code=outcome.exit_code, reason=reason)


def record_refusal(folder: Path, error: TitanError, typed: Typed) -> None:
    """Record a job of a sweep that could not be started. A run that was done there before stays done."""
    run = RunDir(folder)
    run.claim()
    try:
        if run.status().get("state") == "done":
            run.event("refused", str(error))
            return
        write_typed(run, typed)
        run.write_status(started=run.status().get("started", utc_now()))
        record_failure(run, failure.of_exception(error, rank=0))
    finally:
        run.release()


def record_failure(run: RunDir, cause: Failure) -> None:
    """Write the end of a failed job."""
    error: dict[str, Any] = {"rank": cause.rank, "type": cause.type, "message": cause.message}
    if cause.traceback:
        error["traceback"] = cause.traceback
    reason = f"{cause.type}: {cause.summary}"
    run.write_status(state="failed", exit_code=cause.exit_code, reason=reason, error=error)
    run.event("failed", reason, rank=cause.rank)
