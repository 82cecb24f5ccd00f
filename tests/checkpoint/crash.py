"""Program that saves in a child process, kills it, and looks at what is left; prints one JSON record a life.

    python -m tests.checkpoint.crash random FOLDER LIVES   # kill -9 at random instants
    python -m tests.checkpoint.crash points FOLDER         # the process ends at its n-th file operation, for every n

Children are forked, so torch is imported once.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.conftest import make

SIZE = 200_000  # elements of each tensor: some milliseconds to write and to hash


def content(step: int) -> dict[str, Any]:
    weights = {f"w{i}": torch.full((SIZE,), step + i / 8) for i in range(4)}
    return {"model": weights, "optim": {"w0": {"exp_avg": torch.full((SIZE,), -float(step))}}}


def save_for_ever(path: Path, committed: int, *, steps: int = 10**6) -> None:
    """Resume, then save step after step; each step is written to the pipe once ``save`` has returned."""
    checkpointer = make(path)
    newest = checkpointer.latest()
    first = 1 + (checkpointer.load(newest, content(0))["step"] if newest else 0)
    for step in range(first, first + steps):
        checkpointer.save(step, content(step), {"position": 8 * step})
        os.write(committed, f"{step}\n".encode())


def fork(body: Callable[[int], None]) -> tuple[int, int]:
    """(process id, readable end of its pipe)."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body(writable)
        except BaseException as error:
            print(f"child failed: {error!r}", file=sys.stderr)
        os._exit(0)
    os.close(writable)
    return pid, readable


def aftermath(path: Path, readable: int) -> dict[str, Any]:
    """What the dead child had committed, and what can be read now."""
    with os.fdopen(readable) as pipe:
        committed = [int(line) for line in pipe]
    leftovers = sorted(p.name for p in (path / "checkpoints").glob(".*"))
    checkpointer = make(path)
    newest = checkpointer.latest()
    state = content(0)
    meta = checkpointer.load(newest, state) if newest else {"step": 0, "position": 0}
    expected = content(meta["step"])
    is_equal = all(torch.equal(state["model"][n], expected["model"][n]) for n in expected["model"])
    is_equal = is_equal and torch.equal(state["optim"]["w0"]["exp_avg"], expected["optim"]["w0"]["exp_avg"])
    return {
        "committed": committed[-1] if committed else 0,
        "step": meta["step"],
        "position": meta["position"],
        "is_equal": is_equal,
        "leftovers": leftovers,
        "after": sorted(p.name for p in (path / "checkpoints").iterdir()) if newest else [],
    }


def at_random(path: Path, lives: int) -> None:
    for _ in range(lives):
        pid, readable = fork(lambda pipe: save_for_ever(path, pipe))
        time.sleep(random.uniform(0.01, 0.25))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(json.dumps(aftermath(path, readable)))


def at_every_point(path: Path) -> None:
    """Steps 1 and 2 are there (keep=2); the child saves 3, then 3 again, and dies at its n-th file operation."""
    for n in itertools.count(1):
        shutil.rmtree(path, ignore_errors=True)
        checkpointer = make(path)
        for step in (1, 2):
            checkpointer.save(step, content(step), {"position": 8 * step})

        def body(pipe: int, n: int = n, checkpointer: Any = checkpointer) -> None:
            die_at(n)
            for _ in range(2):
                checkpointer.save(3, content(3), {"position": 24})
                os.write(pipe, b"3\n")

        pid, readable = fork(body)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(aftermath(path, readable)))
        if os.waitstatus_to_exitcode(status) == 0:
            return


def die_at(n: int) -> None:
    """End this process at the n-th call that changes what is on the disk."""
    counter = itertools.count(1)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == n:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))
    Path.write_text = deadly(Path.write_text)
    shutil.rmtree = deadly(shutil.rmtree)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "random":
        at_random(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        at_every_point(Path(sys.argv[2]))
