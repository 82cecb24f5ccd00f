"""Start the ranks of one job on this machine, and answer for how they end.

The ranks are plain child processes, not an elastic agent's workers. ``torch.distributed.launcher.elastic_launch`` was
looked at (torch 2.13) and left out for three reasons: it turns the ranks' exit codes into one exception, and a SIGTERM
to it into a ``SignalException`` whatever the ranks saved and exited with; it has one shutdown time-out, where a rank
that saves a checkpoint needs minutes and the peer of a dead rank should go in seconds; and it would bring torch
(seconds, and hundreds of MB) into the parent, which otherwise never imports it. Restarts, its real gift, are not
wanted: a run is repeated from its run directory.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from titanyaml import machine
from titanyaml.config import schema
from titanyaml.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, LaunchError
from titanyaml.launch import failure
from titanyaml.launch.failure import Failure
from titanyaml.rundir import RunDir

#: What the peers of a failed rank get to end by themselves (seconds): they cannot do anything useful any more.
PEER_GRACE_S = 5.0
_POLL_S = 0.05
_ORDERLY = (EXIT_DONE, EXIT_PREEMPTED)


@dataclass(frozen=True)
class Outcome:
    """How a group of ranks ended.

    Args:
        exit_code: of the whole. state: done, preempted, stopped (asked to, before it could save) or failed.
        failure: the cause of ``failed``. signal: the name of the signal that this process got meanwhile.
    """

    exit_code: int
    state: str
    failure: Failure | None = None
    signal: str | None = None


def launch(run: RunDir, *, run_id: str, nproc: int, launch: schema.Launch) -> Outcome:
    """Run ``nproc`` ranks over the config.yaml in ``run`` (claimed by this process) and wait for their end.

    SIGTERM or SIGINT asks the ranks to stop and gives them ``launch.shutdown_grace_s``; a second one kills them.

    Raises:
        LaunchError: more ranks than this machine has GPUs.
    """
    check_devices(nproc)
    failure.clear(run.path)
    with free_port() as port, _stop_signals() as asked:
        group = _Group(run, run_id=run_id, nproc=nproc, port=port)
        try:
            group.watch(asked, grace_s=launch.shutdown_grace_s)
        finally:
            group.end()
        return group.outcome(asked)


def check_devices(nproc: int) -> None:
    """Raise LaunchError when there are GPUs but fewer than ``nproc``. A CPU machine has no limit."""
    gpus = machine.gpus()
    if gpus and nproc > len(gpus):
        raise LaunchError(
            f"{nproc} ranks, but this machine has {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}",
            key="launch.nproc",
            hint=f"a mesh of at most {len(gpus)}; or runner=check, which shows what would run and needs no device",
        )


class _Asked:
    """Signals that this process got.

    ``insisted``: SIGINT came after another signal, which is a person who does not want to wait. A second SIGTERM means
    nothing: schedulers send it to every process of a job, and a shell passes its own on.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.insisted = False

    def __call__(self, number: int, frame: object) -> None:
        self.insisted = self.insisted or (self.name is not None and number == signal.SIGINT)
        self.name = self.name or signal.Signals(number).name


@contextmanager
def _stop_signals() -> Iterator[_Asked]:
    """Count SIGTERM and SIGINT instead of dying of them. In a thread that is not the main one they cannot be caught."""
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, asked) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def free_port() -> Iterator[int]:
    """A loopback port for the ranks' rendezvous, kept from other programs as long as the ranks live.

    The socket is bound and never listens: rank 0 can listen on the port (both allow reuse), but the kernel hands it out
    to nobody else.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def rank_environment(rank: int, *, nproc: int, port: int) -> dict[str, str]:
    """The environment of one rank: the user's own, and what torch.distributed reads."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // nproc)))
    # threads that wait spin by default: on cores shared with other programs a step then took 4 to 7 times as long
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not stop ranks of one host
    return env | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class _Group:
    """The processes of one job. Each is a session of its own: a Ctrl-C in the terminal reaches only the parent, which
    then asks them in order, and a rank is killed with all that it started."""

    def __init__(self, run: RunDir, *, run_id: str, nproc: int, port: int) -> None:
        self.run, self.killed = run, False
        self.logs: list[IO[bytes]] = []
        self.processes: list[subprocess.Popen] = []
        self.ended: dict[int, float] = {}
        command = [
            sys.executable,
            "-m",
            "titanyaml.launch.rank",
            "--run-dir",
            str(run.path),
            "--run-id",
            run_id,
            "--generation",
            str(run.generation),
            "--parent",
            str(os.getpid()),
        ]
        try:
            for rank in range(nproc):
                output = self._output(rank)
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=rank_environment(rank, nproc=nproc, port=port),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.end()
            raise

    def _output(self, rank: int) -> IO[bytes] | None:
        """Rank 0 writes to the console, each other rank to its own log: the same line N times helps nobody."""
        if rank == 0:
            return None
        path = _log_path(self.run, rank)
        path.parent.mkdir(exist_ok=True)
        self.logs.append(open(path, "ab"))  # noqa: SIM115 - closed by end()
        return self.logs[-1]

    def watch(self, asked: _Asked, *, grace_s: float) -> None:
        """Wait for all ranks; on a failure or a signal see to it that they end in time."""
        deadline, told = float("inf"), False
        while len(self.ended) < len(self.processes):
            self._note_ended()
            codes = [self.processes[rank].returncode for rank in self.ended]
            if asked.name and not told:
                told = True
                self._signal(signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + grace_s)
            if asked.insisted:
                deadline = 0.0
            if any(code not in _ORDERLY for code in codes):
                deadline = min(deadline, time.monotonic() + PEER_GRACE_S)
            elif EXIT_PREEMPTED in codes:
                deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                self.killed = True
                self._signal(signal.SIGKILL)
            time.sleep(_POLL_S)

    def _note_ended(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and _has_ended(process):
                self.ended[rank] = time.time()
                # what it started and left behind; its number is not given to others before it is waited for
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _signal(self, number: int) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                os.killpg(process.pid, number)

    def end(self) -> None:
        """Nothing of the group outlives this call."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for log in self.logs:
            log.close()

    def outcome(self, asked: _Asked) -> Outcome:
        """One verdict over all ranks."""
        codes = {rank: process.returncode for rank, process in enumerate(self.processes)}
        if all(code == EXIT_DONE for code in codes.values()):
            return Outcome(EXIT_DONE, "done", signal=asked.name)
        if all(code in _ORDERLY for code in codes.values()):
            return Outcome(EXIT_PREEMPTED, "preempted", signal=asked.name)
        if asked.insisted:
            return Outcome(EXIT_FAILED, "stopped", signal=asked.name)
        if asked.name and -signal.SIGTERM in codes.values():
            # the signal came before the rank listened for it: nothing was begun that could be lost
            return Outcome(EXIT_PREEMPTED, "stopped", signal=asked.name)
        told = failure.collect(self.run.path)
        known = {found.rank for found in told}
        mute = [rank for rank, code in codes.items() if code not in _ORDERLY and rank not in known]
        cause = failure.earliest(told + [self._silent(rank, codes[rank]) for rank in mute])
        return Outcome(cause.exit_code, "failed", failure=cause, signal=asked.name)

    def _silent(self, rank: int, code: int) -> Failure:
        """The failure of a rank that left no word: ended by a signal, or from below Python."""
        killed = self.killed and code == -signal.SIGKILL
        if killed:
            how = "did not end in time (launch.shutdown_grace_s after a signal) and was killed"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        else:
            how = f"ended with exit code {code}"
        return Failure(
            rank=rank,
            time=self.ended[rank],
            type="signal" if code < 0 else "exit",
            summary=f"it {how}",
            traceback="",
            message=f"it {how}{_tail(_log_path(self.run, rank))}",
            exit_code=EXIT_FAILED,
            lost_peer=killed,
        )


def _has_ended(process: subprocess.Popen) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _log_path(run: RunDir, rank: int) -> Path:
    return run.path / "logs" / f"rank-{rank}.log"


def _tail(path: Path, lines: int = 20) -> str:
    if not path.exists() or not (text := path.read_text(errors="replace").rstrip()):
        return ""
    return f"; the end of {path}:\n" + "\n".join(text.splitlines()[-lines:])
