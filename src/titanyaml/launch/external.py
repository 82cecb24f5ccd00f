"""Join the ranks that torchrun started (``launch=external``, noticed by itself).

Every rank composes the configuration, because torchrun starts the command line once per rank. Only rank 0's counts: it
alone claims the run directory and writes the records, and hands its config.yaml to the others. So clocks and file
systems that differ between hosts cannot make the ranks disagree.
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

from titanyaml.config import dump
from titanyaml.distributed import signals
from titanyaml.errors import LaunchError, TitanError
from titanyaml.launch import failure, job, rank
from titanyaml.launch.job import ClaimedRun, RequestedRun
from titanyaml.rundir import RunDir

if TYPE_CHECKING:
    from titanyaml.distributed.env import Env

#: Ranks other than 0 must not write Hydra's folders and logs.
_SILENT_RANK = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


def inside_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank that torchrun, or another launcher, started."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def hydra_arguments(arguments: list[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command line of this rank for Hydra; LaunchError for a sweep."""
    if any(argument in ("-m", "--multirun") for argument in arguments):
        raise sweep_refusal()
    added = ["launch.kind=external"]
    # an elastic restart is a new process with a new clock: only torchrun's own id finds the run again
    restarts, job_id = environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), environ.get("TORCHELASTIC_RUN_ID", "none")
    if restarts != "0" and job_id != "none" and not any(argument.startswith("run.id=") for argument in arguments):
        added.append(f"run.id={job_id}")
    return [*arguments, *added, *(_SILENT_RANK if environ["RANK"] != "0" else ())]


def sweep_refusal() -> LaunchError:
    """Why torchrun and a sweep do not go together."""
    return LaunchError(
        "a sweep cannot run inside torchrun, where every rank would run all of it",
        key="--multirun",
        hint="python -m titanyaml -m ... without torchrun: each job starts ranks of its own",
    )


def refuse_without_torchrun(kind: str) -> None:
    """Raise LaunchError if ``launch.kind`` (``kind``) waits for ranks that nobody has started."""
    if kind == "external":
        raise LaunchError(
            "external joins ranks that torchrun has started, and this process is not one",
            key="launch.kind",
            hint="launch=local, or torchrun --nproc-per-node N -m titanyaml ...",
        )


def run(request: RequestedRun) -> float | None:
    """Run as one rank of the group; the metric, if there is one.

    A failure ends the process here, with the exit code that it means (torchrun itself exits with 1).
    """
    number = int(os.environ["RANK"])
    rank.configure_logging(number)
    signals.install()
    run_dir: RunDir | None = None
    try:
        env = rank.join(request.config)
        claimed = _claim_together(request, env)
        run_dir = claimed.run
        if claimed.is_finished:
            rank.leave_group(env)
            if env.is_main:
                print(f"{run_dir.path} is finished; nothing to do", file=sys.stderr)
            return run_dir.status().get("metric")
        exit_code = rank.perform(claimed.config, run_dir, env)
    except BaseException as error:  # noqa: BLE001 - a rank must leave at once, its peers may be waiting for it
        rank.leave(_report(error, run_dir, number))
    if env.is_main:
        run_dir.release()
    if exit_code:
        rank.leave(exit_code)
    return run_dir.status().get("metric")


def _claim_together(request: RequestedRun, env: Env) -> ClaimedRun:
    """Rank 0 claims the run, all ranks get it; an error of rank 0 is raised on all."""
    from titanyaml.distributed import comm  # torch

    claimed: ClaimedRun | None = None
    error: TitanError | None = None
    if env.is_main:
        try:
            claimed = job.claim(request, ranks=env.world_size)
        except TitanError as refusal:
            error = refusal
    # a RunDir cannot travel, a thread of this process keeps its lease: the others get what names it
    fields: tuple[str, int, str, str, bool] | None = None
    if claimed is not None:
        run = claimed.run
        fields = str(run.path), run.generation, claimed.config.run.id, claimed.text, claimed.is_finished
    fields, error = comm.broadcast_object((fields, error), env)
    if error is not None:
        raise error
    if claimed is not None:
        return claimed
    assert fields is not None, "rank 0 sends either an error or its run"
    path, generation, run_id, text, is_finished = fields
    config = dump.from_yaml(text, run_id=run_id, run_dir=path)
    return ClaimedRun(config, RunDir(path, generation=generation), text, is_finished)


def _report(error: BaseException, run: RunDir | None, number: int) -> int:
    """Print the error once, record it for torchrun and in the run directory; the exit code."""
    own_failure = failure.of_exception(error, rank=number)
    _write_torchrun_error(error)
    if run is None:
        if number == 0:
            print(error if isinstance(error, TitanError) else traceback.format_exc(), file=sys.stderr)
        return own_failure.exit_code
    failure.write(own_failure, run.path)
    if number == 0:
        time.sleep(1.0 if own_failure.lost_peer else 0.0)  # let the peer that is the cause write its own
        cause = failure.earliest(failure.collect(run.path))
        job.record_failure(run, cause)
        print(cause.text(), file=sys.stderr)
        run.release()
    return own_failure.exit_code


def _write_torchrun_error(error: BaseException) -> None:
    """What torchrun prints in its summary, in the format of its error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}))
