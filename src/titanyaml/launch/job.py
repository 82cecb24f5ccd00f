"""One job: from a typed configuration to a claimed run directory that says what will run, and its record afterwards."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from titanyaml import machine
from titanyaml.config import degrees, dump
from titanyaml.config.schema import Config
from titanyaml.config.world import count_ranks
from titanyaml.errors import TitanError
from titanyaml.launch import failure, local, resume
from titanyaml.launch.failure import Failure
from titanyaml.launch.local import Outcome
from titanyaml.rundir import RunDir, atomic_write, utc_now


@dataclass(frozen=True)
class UserChoices:
    """overrides: of the command line. options: group to option. is_sweep: whether this is one job of a sweep."""

    overrides: list[str]
    options: dict[str, str]
    is_sweep: bool = False


@dataclass(frozen=True)
class RequestedRun:
    """A run as the command line composed it, before anything is claimed or written. text: of config.yaml."""

    config: Config
    text: str
    folder: Path
    choices: UserChoices


@dataclass(frozen=True)
class ClaimedRun:
    """A configuration in its run directory, which this process owns. text: of config.yaml. is_finished: an earlier
    attempt has done it all; nothing is to be run, and the claim is given back."""

    config: Config
    run: RunDir
    text: str
    is_finished: bool = False


def claim(request: RequestedRun, *, ranks: int | None) -> ClaimedRun:
    """Claim the folder and write config.yaml, overrides.yaml, environment.json and status.json there.

    The claim is given back when anything goes wrong, and when the run turns out to be finished.

    Raises:
        ConfigError: no mesh of this many ranks satisfies ``parallel``, or the folder holds a run that this
            configuration cannot go on with.
        LaunchError: another process works there.
    """
    run, config = RunDir(request.folder), request.config
    # all that can be refused without the folder comes before the claim
    global_batch = degrees.global_batch(config, degrees.resolve_degrees(config.parallel, world_size=ranks))
    resume.refuse_checkpoint_keys(config, request.choices.overrides)
    run.claim()
    try:
        changes = resume.check_changes(config, request.text, run, global_batch=global_batch)
        # jobs of a sweep share Hydra's clock, so the folder tells them apart; each keeps its first identity
        new_id = f"{config.run.id}-{run.path.name}" if request.choices.is_sweep else config.run.id
        identity = replace(config.run, id=run.status().get("run_id", new_id), dir=str(run.path))
        config = replace(config, run=identity)
        if resume.is_finished(run, changes, steps=config.train.steps):
            run.release()
            return ClaimedRun(config, run, request.text, is_finished=True)
        if changes:
            lines = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items()]
            run.event("resumed_with_changes", "; ".join(lines))
        # what ran is what is written: ranks read this file and compose nothing
        atomic_write(run.path / "config.yaml", request.text)
        _write_choices(run, request.choices)
        atomic_write(run.path / "environment.json", json.dumps(machine.describe(), indent=2) + "\n")
        _write_started(run, config, ranks=ranks, global_batch=global_batch)
    except BaseException:
        run.release()
        raise
    return ClaimedRun(config, run, request.text)


def _write_choices(run: RunDir, choices: UserChoices) -> None:
    text = yaml.safe_dump({"overrides": choices.overrides, "choices": choices.options}, sort_keys=False)
    atomic_write(run.path / "overrides.yaml", text)


def _write_started(run: RunDir, config: Config, *, ranks: int | None, global_batch: int) -> None:
    earlier_end = dict.fromkeys(("reason", "error", "exit_code"))  # None removes what an earlier attempt left
    identity = {"run_id": config.run.id, "runner": config.runner.name, "config_hash": dump.config_hash(config)}
    sizes = {"world_size": ranks, "global_batch": global_batch}
    started = run.status().get("started", utc_now())
    run.write_status(state="running", **identity, **sizes, generation=run.generation, **earlier_end, started=started)


def run_local(request: RequestedRun) -> tuple[ClaimedRun, Outcome | None]:
    """Run on ranks of this machine; no outcome if the run was finished before."""
    ranks = count_ranks(request.config)
    assert ranks is not None, "only torchrun's ranks cannot be counted before they start"
    local.check_devices(ranks)  # before the folder is claimed: a refused job leaves no files
    claimed = claim(request, ranks=ranks)
    if claimed.is_finished:
        return claimed, None
    config, run = claimed.config, claimed.run
    try:
        outcome = local.launch(run, run_id=config.run.id, nproc=ranks, launch=config.launch)
        # the states done and preempted are recorded by rank 0
        if outcome.failure is not None:
            record_failure(run, outcome.failure)
        elif outcome.state == "stopped":
            reason = f"{outcome.signal}, before the ranks had saved"
            run.write_status(state="stopped", exit_code=outcome.exit_code, reason=reason)
    finally:
        run.release()
    return claimed, outcome


def record_refusal(folder: Path, error: TitanError, choices: UserChoices) -> None:
    """Record a job of a sweep that could not be started. A run that was done there before stays done."""
    run = RunDir(folder)
    run.claim()
    try:
        if run.status().get("state") == "done":
            run.event("refused", str(error))  # its results are still good
            return
        _write_choices(run, choices)
        run.write_status(started=run.status().get("started", utc_now()))  # rows of the sweep's table are in this order
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
