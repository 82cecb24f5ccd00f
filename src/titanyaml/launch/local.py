"""Start the ranks of one job on this machine, watch them, and give one verdict on how they ended.

The ranks are plain child processes. ``torch.distributed.launcher.elastic_launch`` (as of torch 2.13) is not used, for
three reasons. It turns the ranks' exit codes into one exception, and a SIGTERM into a ``SignalException``, whatever the
ranks saved. It has one shutdown time-out, where a rank that saves a checkpoint needs minutes and the peer of a dead
rank should end in seconds. It would bring torch (seconds, and hundreds of MB) into the parent, which otherwise never
imports it. Its restarts are not needed: a run is repeated from its run directory.
"""

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

#: Time for the peers of a failed rank to end by themselves (seconds): they cannot do anything useful any more.
PEER_GRACE_S = 5.0
_POLL_S = 0.05
_ORDERLY = (EXIT_DONE, EXIT_PREEMPTED)  # a rank that exits with these has recorded its own end


@dataclass(frozen=True)
class Outcome:
    """How a group of ranks ended. state: done, preempted, stopped (by a signal, before it could save) or failed.
    failure: the cause of ``failed``. signal: the name of the signal that this process received meanwhile."""

    exit_code: int
    state: str
    failure: Failure | None = None
    signal: str | None = None


def launch(run: RunDir, *, run_id: str, nproc: int, launch: schema.Launch) -> Outcome:
    """Run ``nproc`` ranks over the config.yaml in ``run`` (claimed by this process) and wait for their end.

    SIGTERM or SIGINT asks the ranks to stop and gives them ``launch.shutdown_grace_s``; a Ctrl-C after it kills them.
    """
    check_devices(nproc)
    failure.clear(run.path)  # of an earlier attempt in the same folder
    with free_port() as port, _catch_stop_signals() as signals:
        group = _Group(run, run_id=run_id, nproc=nproc, port=port)
        try:
            group.watch(signals, grace_s=launch.shutdown_grace_s)
        finally:
            group.end()
        return group.outcome(signals)


def check_devices(nproc: int) -> None:
    """Raise LaunchError when there are GPUs but fewer than ``nproc``. A CPU machine has no limit."""
    gpus = machine.gpus()
    if gpus and nproc > len(gpus):
        raise LaunchError(
            f"{nproc} ranks, but this machine has {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}",
            key="launch.nproc",
            hint=f"a mesh of at most {len(gpus)}; or runner=check, which shows what would run and needs no device",
        )


class _StopSignals:
    """Signals that this process received.

    name: of the first. insisted: SIGINT came after another signal, from a person who does not want to wait. A second
    SIGTERM means nothing: schedulers send it to every process of a job, and a shell passes its own on.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.insisted = False

    def __call__(self, number: int, frame: object) -> None:
        self.insisted = self.insisted or (self.name is not None and number == signal.SIGINT)
        self.name = self.name or signal.Signals(number).name


@contextmanager
def _catch_stop_signals() -> Iterator[_StopSignals]:
    """Record SIGTERM and SIGINT instead of dying of them."""
    signals = _StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python sets handlers in the main thread only
        return
    handlers = {number: signal.signal(number, signals) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def free_port() -> Iterator[int]:
    """A loopback port for the ranks' rendezvous, reserved as long as the ranks live.

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
    # torch would start a thread a core in every rank
    env.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // nproc)))
    # threads that wait spin by default: on cores shared with other programs a step then took 4 to 7 times as long
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not stop ranks of one host
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return env | {name: str(value) for name, value in (ranks | rendezvous).items()}


class _Group:
    """The processes of one job.

    Each has a session of its own. So a Ctrl-C in the terminal reaches only the parent, which passes it on; and a rank
    is killed together with the processes that it started.
    """

    def __init__(self, run: RunDir, *, run_id: str, nproc: int, port: int) -> None:
        self.run, self.killed = run, False
        self.logs: list[IO[bytes]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, float] = {}  # rank -> when, in seconds since the epoch
        command = [sys.executable, "-m", "titanyaml.launch.rank", "--run-dir", str(run.path), "--run-id", run_id]
        command += ["--generation", str(run.generation), "--parent", str(os.getpid())]
        try:
            for rank in range(nproc):
                env, output = rank_environment(rank, nproc=nproc, port=port), self._output(rank)
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
                self.processes.append(process)
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

    def watch(self, signals: _StopSignals, *, grace_s: float) -> None:
        """Wait for all ranks; after a failure or a signal kill those that do not end in time."""
        deadline, signal_sent = float("inf"), False
        while len(self.ended) < len(self.processes):
            self._note_ended()
            codes = [self.processes[rank].returncode for rank in self.ended]
            if signals.name and not signal_sent:
                signal_sent = True
                self._signal(signal.SIGTERM)  # for SIGINT too: ranks treat both alike
                deadline = min(deadline, time.monotonic() + grace_s)
            if signals.insisted:
                deadline = 0.0  # now
            if any(code not in _ORDERLY for code in codes):
                deadline = min(deadline, time.monotonic() + PEER_GRACE_S)
            elif EXIT_PREEMPTED in codes:  # its peers save as well
                deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                self.killed = True
                self._signal(signal.SIGKILL)
            time.sleep(_POLL_S)

    def _note_ended(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and _has_ended(process):
                self.ended[rank] = time.time()  # wall clock, to be compared with what other ranks recorded
                # kill what it started and left behind; its process id is not reused before it is waited for
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _signal(self, number: int) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                os.killpg(process.pid, number)

    def end(self) -> None:
        """Kill what is left of the group; no process of it outlives this call."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for log in self.logs:
            log.close()

    def outcome(self, signals: _StopSignals) -> Outcome:
        """One verdict over all ranks."""
        codes = {rank: process.returncode for rank, process in enumerate(self.processes)}
        if all(code == EXIT_DONE for code in codes.values()):
            return Outcome(EXIT_DONE, "done", signal=signals.name)
        if all(code in _ORDERLY for code in codes.values()):
            return Outcome(EXIT_PREEMPTED, "preempted", signal=signals.name)
        if signals.insisted:
            return Outcome(EXIT_FAILED, "stopped", signal=signals.name)
        if signals.name and -signal.SIGTERM in codes.values():
            # the signal came before the rank listened for it: nothing was begun that could be lost
            return Outcome(EXIT_PREEMPTED, "stopped", signal=signals.name)
        failures = failure.collect(self.run.path)
        recorded = {record.rank for record in failures}
        unrecorded = [rank for rank, code in codes.items() if code not in _ORDERLY and rank not in recorded]
        cause = failure.earliest(failures + [self._unrecorded_failure(rank, codes[rank]) for rank in unrecorded])
        return Outcome(cause.exit_code, "failed", failure=cause, signal=signals.name)

    def _unrecorded_failure(self, rank: int, code: int) -> Failure:
        """The failure of a rank that could not write one: ended by a signal, or from below Python."""
        killed = self.killed and code == -signal.SIGKILL
        if killed:
            summary = "it did not end in time (launch.shutdown_grace_s after a signal) and was killed"
        elif code == -signal.SIGKILL:
            summary = "it was ended by SIGKILL (out of memory?)"  # not by us: the kernel does that then
        elif code < 0:
            summary = f"it was ended by {signal.Signals(-code).name}"
        else:
            summary = f"it ended with exit code {code}"
        kind, message = "signal" if code < 0 else "exit", summary + _tail(_log_path(self.run, rank))
        return Failure(rank, self.ended[rank], kind, message, summary, "", EXIT_FAILED, lost_peer=killed)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    # WNOWAIT leaves a zombie, whose id stays taken until its group is killed
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _log_path(run: RunDir, rank: int) -> Path:
    return run.path / "logs" / f"rank-{rank}.log"


def _tail(path: Path, lines: int = 20) -> str:
    if not path.exists() or not (text := path.read_text(errors="replace").rstrip()):
        return ""
    return f"; the end of {path}:\n" + "\n".join(text.splitlines()[-lines:])
