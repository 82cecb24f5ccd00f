"""Join the ranks that torchrun started (``launch=external``, noticed by itself).

Every rank composes the configuration, because torchrun starts the command line once per rank. Only rank 0's counts: it
alone claims the run directory and writes the records, and hands its config.yaml to the others, so that clocks and
file systems that differ between hosts cannot make the ranks disagree.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from titanyaml.config import dump
from titanyaml.distributed import signals
from titanyaml.errors import LaunchError, TitanError
from titanyaml.launch import failure, rank
from titanyaml.launch.job import Job, Typed, open_job, record_failure
from titanyaml.rundir import RunDir

if TYPE_CHECKING:
    from titanyaml.distributed.env import Env

#: What Hydra must not do on ranks other than 0.
_SILENT_RANK = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


def inside_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank that somebody else started."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def hydra_arguments(arguments: list[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command line of this rank for Hydra.

    Raises:
        LaunchError: a sweep.
    """
    if any(argument in ("-m", "--multirun") for argument in arguments):
        raise sweep_refusal()
    added = ["launch.kind=external"]
    # an elastic restart is a new process with a new clock: only torchrun's own id finds the run again
    restarts, job = environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), environ.get("TORCHELASTIC_RUN_ID", "none")
    if restarts != "0" and job != "none" and not any(argument.startswith("run.id=") for argument in arguments):
        added.append(f"run.id={job}")
    return [*arguments, *added, *(_SILENT_RANK if environ["RANK"] != "0" else ())]


def sweep_refusal() -> LaunchError:
    """Why torchrun and a sweep do not go together."""
    return LaunchError(
        "a sweep cannot run inside torchrun, where every rank would run all of it",
        key="--multirun",
        hint="python -m titanyaml -m ... without torchrun: each job starts ranks of its own",
    )


def refuse_without_torchrun(kind: str) -> None:
    """Raise LaunchError where ``launch.kind`` (``kind``) waits for ranks that nobody has started."""
    if kind == "external":
        raise LaunchError(
            "external joins ranks that torchrun has started, and this process is not one",
            key="launch.kind",
            hint="launch=local, or torchrun --nproc-per-node N -m titanyaml ...",
        )


def run(cfg: DictConfig, folder: Path, typed: Typed) -> float | None:
    """Run ``cfg`` as one rank of the group.

    Returns:
        The metric; on rank 0 of a run that was finished before, the recorded one.

    A failure ends the process here, with the exit code that it means (torchrun itself exits with 1).
    """
    number = int(os.environ["RANK"])
    rank.configure_logging(number)
    signals.install()
    config = dump.to_dataclass(cfg)
    where: RunDir | None = None
    try:
        env = rank.join(config)
        job = _agree(cfg, folder, typed, env)
        where = job.run
        if job.finished:
            rank.leave_group(env)
            if env.is_main:
                print(f"{job.run.path} is finished; nothing to do", file=sys.stderr)
            return job.run.status().get("metric")
        code = rank.perform(job.config, job.run, env)
    except BaseException as error:  # noqa: BLE001 - a rank must leave at once, its peers may be waiting for it
        rank.leave(_told(error, where, number))
    if env.is_main:
        job.run.release()
    if code:
        rank.leave(code)
    return job.run.status().get("metric")


def _agree(cfg: DictConfig, folder: Path, typed: Typed, env: Env) -> Job:
    """Rank 0 opens the job, all ranks get it; what rank 0 was refused is raised on all."""
    from titanyaml.distributed import comm

    opened, refused = None, None
    if env.is_main:
        try:
            opened = open_job(cfg, folder, ranks=env.world_size, typed=typed)
        except TitanError as error:
            refused = error
    told = opened and (str(opened.run.path), opened.run.generation, opened.run_id, opened.text, opened.finished)
    told, refused = comm.broadcast_object((told, refused), env)
    if refused is not None:
        raise refused
    if env.is_main:
        return opened
    path, generation, run_id, text, finished = told
    config = dump.to_dataclass(dump.parse(text, run_id=run_id, run_dir=path))
    return Job(config, RunDir(path, generation=generation), run_id, text, finished)


def _told(error: BaseException, run: RunDir | None, number: int) -> int:
    """Tell the error once, leave it for torchrun and in the run directory; the exit code."""
    found = failure.of_exception(error, rank=number)
    _tell_torchrun(error)
    if run is None:
        if number == 0:
            print(error if isinstance(error, TitanError) else traceback.format_exc(), file=sys.stderr)
        return found.exit_code
    failure.write(found, run.path)
    if number == 0:
        time.sleep(1.0 if found.lost_peer else 0.0)  # let the peer that is the cause write its own
        cause = failure.earliest(failure.collect(run.path))
        record_failure(run, cause)
        print(cause.text(), file=sys.stderr)
        run.release()
    return found.exit_code


def _tell_torchrun(error: BaseException) -> None:
    """What torchrun prints in its summary, in the format of its error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}))
