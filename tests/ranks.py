"""Run a function on several gloo ranks, in processes that stay alive between tests.

    from tests.ranks import run_ranks

    def body(rank, factor):                 # module level: it travels by name
        total = torch.tensor([rank * factor])
        torch.distributed.all_reduce(total)
        return total.item()

    def test_sum():
        assert run_ranks(body, 2, 10) == [10, 10]

``run_ranks(fn, world_size, *args)`` calls ``fn(rank, *args)`` on each rank inside a fresh process group and returns the
results in rank order. The process environment is torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT),
so ``Env.from_environ("cpu")`` gives the rank's Env. With ``start=False`` no group is started and ``fn`` starts and
stops its own. Results and arguments are pickled (tensors by value). The earliest exception of a rank is raised here
with the rank's traceback as a note. Importing torch costs seconds, so processes are kept: a test must not leave torch's
global state changed (default dtype, threads, hooks). After a time-out, or when a rank hangs because another one failed,
all processes are killed and the next call starts new ones.

``tests`` and its folders are packages (``__init__.py``): that is what makes this import work under plain ``pytest``,
and lets two folders have files of one name.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

HANG_GRACE_S = 5.0  # how long ranks may go on after another rank has failed
GROUP_TIMEOUT_S = 60.0  # limit of one collective


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, start: bool = True
) -> list[Any]:
    """``[fn(0, *args), fn(1, *args), ...]``, each on its own rank.

    Raises:
        Exception: what the first failing rank raised.
        TimeoutError: a rank did not answer within ``timeout_s``.
    """
    return _POOL.run(fn, world_size, args, timeout_s, start)


class _Pool:
    """Processes by rank; a call uses the first ``world_size`` of them."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple, timeout_s: float, start: bool) -> list[Any]:
        from torch.distributed import TCPStore

        self._grow(world_size)
        # a store of this process per call: no port is chosen before it is bound, no two groups share keys
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        call = pickle.dumps((fn, args))
        pipes = [pipe for _, pipe in self.workers[:world_size]]
        for rank, pipe in enumerate(pipes):
            pipe.send((sys.path, _environ(rank, world_size, store.port), call, start))
        answers = self._collect(pipes, timeout_s)
        failures = [(failed_at, rank, error) for rank, (failed_at, _, error) in answers.items() if error is not None]
        if len(answers) < world_size or not all(process.is_alive() for process, _ in self.workers):
            self.close(kill=True)
        else:
            self._leave(pipes, clean=not failures)
        if failures:
            _, rank, error = min(failures, key=lambda failure: failure[0])
            raise _unpack(error, rank)
        if len(answers) < world_size:
            silent = sorted(set(range(world_size)) - set(answers))
            raise TimeoutError(f"rank(s) {silent} of {world_size} gave no answer within {timeout_s} s")
        return [pickle.loads(answers[rank][1]) for rank in range(world_size)]

    def _grow(self, world_size: int) -> None:
        if any(not process.is_alive() for process, _ in self.workers):
            self.close(kill=True)
        context = multiprocessing.get_context("spawn")
        before = os.environ.copy()
        os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host name need not resolve
        try:
            while len(self.workers) < world_size:
                pool_end, worker_end = context.Pipe()
                process = context.Process(target=_serve, args=(worker_end,), daemon=True)
                process.start()
                worker_end.close()
                self.workers.append((process, pool_end))
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _collect(self, pipes: list[Connection], timeout_s: float) -> dict[int, tuple[float, bytes, Any]]:
        """Answers by rank, until all are there, time is up, or the ranks left over hang after a failure."""
        answers: dict[int, tuple[float, bytes, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(pipes):
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    process = self.workers[rank][0]
                    process.join(HANG_GRACE_S)
                    answers[rank] = (time.time(), b"", (b"", f"the process died, exit code {process.exitcode}"))
                if answers[rank][2] is not None:
                    deadline = min(deadline, time.monotonic() + HANG_GRACE_S)
        return answers

    def _leave(self, pipes: list[Connection], *, clean: bool) -> None:
        """Have all groups torn down. All ranks have answered, which is the barrier where one of them failed."""
        try:
            for pipe in pipes:
                pipe.send(clean)
            if not all(pipe.poll(HANG_GRACE_S) and pipe.recv() for pipe in pipes):
                raise EOFError
        except (EOFError, OSError):
            self.close(kill=True)

    def close(self, *, kill: bool = False) -> None:
        """End all processes; without ``kill`` they get time to leave by themselves."""
        for process, pipe in self.workers:
            pipe.close()  # end of file: the worker returns
            if kill:
                process.kill()
        for process, _ in self.workers:
            process.join(HANG_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self.workers.clear()


_POOL = _Pool()
atexit.register(_POOL.close)


def _environ(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set; the agent store is the test process's."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _unpack(error: tuple[bytes, str], rank: int) -> BaseException:
    pickled, text = error
    try:
        exception = pickle.loads(pickled)
    except Exception:
        return RuntimeError(f"rank {rank} failed:\n{text}")
    exception.add_note(f"on rank {rank}:\n{text}")
    return exception


def _serve(pipe: Connection) -> None:
    """Serve calls until the pipe closes: answer one, wait for the other ranks, leave the group."""
    gc.set_threshold(50_000)  # importing torch leaves no garbage, and looking for it takes a seventh of that time
    import torch

    torch.set_num_threads(1)
    for number in itertools.count(1):
        try:
            path, environ, call, start = pipe.recv()
            sys.path[:] = path
            os.environ.update(environ)
            pipe.send(_answer(call, start, int(environ["RANK"])))
            _leave(clean=pipe.recv())
            if number % 4 == 0:
                _forget_groups()
            pipe.send(True)
        except (EOFError, OSError):
            return


def _answer(call: bytes, start: bool, rank: int) -> tuple[float, bytes, tuple[bytes, str] | None]:
    """(time, pickled result, failure) of one call."""
    from titanyaml.distributed import env

    try:
        if start:
            env.start(env.Env.from_environ("cpu"), timeout_s=GROUP_TIMEOUT_S)
        fn, args = pickle.loads(call)
        return time.time(), pickle.dumps(fn(rank, *args)), None
    except BaseException as exception:
        try:
            pickled = pickle.dumps(exception)
        except Exception:
            pickled = b""
        return time.time(), b"", (pickled, traceback.format_exc())


def _forget_groups() -> None:
    # torch's mesh caches keep destroyed groups alive; the threads of hundreds would take half of the machine
    if "torch.distributed.tensor" in sys.modules:
        from titanyaml.distributed import compat

        compat.clear_mesh_caches()
    gc.collect()


def _leave(*, clean: bool) -> None:
    import torch.distributed as dist

    from titanyaml.distributed import env

    if clean:
        env.stop(env.Env.from_environ("cpu"))
    elif dist.is_initialized():
        dist.destroy_process_group()  # a rank failed: no barrier
