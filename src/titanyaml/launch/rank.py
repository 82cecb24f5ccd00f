"""One rank: ``python -m titanyaml.launch.rank --run-dir D --run-id I --generation G --parent PID``.

Reads config.yaml, joins the process group, calls ``runner._target_`` as ``(config, run, env) -> dict | None`` and ends
with the exit code of what happened. A rank that fails leaves at once, without waiting for collectives that its peers
are in.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titanyaml.distributed import signals
from titanyaml.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, Preempted
from titanyaml.launch import failure
from titanyaml.rundir import RunDir

# Hydra, OmegaConf and torch are imported where they are used: a rank must first be able to die and to be stopped
if TYPE_CHECKING:
    from titanyaml.config.schema import Config
    from titanyaml.distributed.env import Env

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run this rank and leave."""
    parser = argparse.ArgumentParser(prog="titanyaml.launch.rank")
    for flag, kind in (("--run-dir", Path), ("--run-id", str), ("--generation", int), ("--parent", int)):
        parser.add_argument(flag, type=kind, required=True)
    options = parser.parse_args(arguments)
    die_with(options.parent)
    signals.install()
    # until the runner is imported: torch's modules stay, and collections that look through them again and again take a
    # seventh of that time
    gc.disable()
    run = RunDir(options.run_dir, generation=options.generation)
    rank = int(os.environ["RANK"])
    try:
        from titanyaml.config import dump

        configure_logging(rank)
        config = dump.load(run.path / "config.yaml", run_id=options.run_id, run_dir=str(run.path))
        code = perform(config, run, join(config))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher must learn of it
        # in a file: an exit code is a byte, and rank 0's console is not the other ranks'
        own_failure = failure.of_exception(error, rank=rank)
        failure.write(own_failure, run.path)
        code = own_failure.exit_code
    leave(code)


def join(config: Config) -> Env:
    """Enter the process group that the environment describes."""
    from titanyaml.distributed import env as environment

    env = environment.Env.from_environ()
    environment.start(env, timeout_s=config.launch.startup_timeout_s)
    return env


def leave_group(env: Env) -> None:
    """Leave the process group together with all other ranks."""
    from titanyaml.distributed import env as environment

    environment.stop(env)


def perform(config: Config, run: RunDir, env: Env) -> int:
    """Call the runner, leave the group, record the result on rank 0; EXIT_DONE, EXIT_PREEMPTED, or an exception."""
    from titanyaml.config import instantiate

    runner = instantiate.locate(config.runner._target_)  # imports the runner, and torch with it
    gc.enable()
    try:
        result: dict[str, Any] | None = runner(config, run, env)
        exit_code = EXIT_DONE
        record = {"state": "done", "exit_code": exit_code, **(result or {})}
    except Preempted as stop:
        # every rank agreed to stop and has saved: this is an orderly end, the group can be taken down
        exit_code = EXIT_PREEMPTED
        record = {"state": "preempted", "exit_code": exit_code, "reason": stop.message}
    leave_group(env)
    if env.is_main:
        run.check_generation()  # another process may have taken the folder over meanwhile
        run.write_status(**record)
    return exit_code


def leave(code: int) -> NoReturn:
    """End now, without the interpreter's own shutdown.

    After a failure the shutdown could wait for threads that wait for dead peers. After success everything is closed and
    recorded, and it would take all of torch apart (a second).
    """
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        atexit._run_exitfuncs()  # of libraries: compile workers end by them
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def configure_logging(rank: int) -> None:
    """Rank 0 of titanyaml logs information; other ranks, and libraries, log warnings only."""
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        force=True,
        format="%(message)s" if rank == 0 else f"[rank {rank}] %(message)s",
    )
    logging.getLogger("titanyaml").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, however it ends; if it cannot, a thread watches."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl: there will be no signal
        os._exit(EXIT_FAILED)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
