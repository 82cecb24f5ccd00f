"""Runners that stand in for training in the tests of the launcher; ``user`` in the configuration directs them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from titanyaml import tracker
from titanyaml.config.schema import Config
from titanyaml.distributed import comm, signals
from titanyaml.distributed.env import Env
from titanyaml.errors import DataError, NonFiniteError, Preempted
from titanyaml.rundir import RunDir


def train(config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """A run of ``train.steps`` steps whose metric is the learning rate; leaves a record of each step."""
    run.event(
        "started",
        "here",
        rank=env.rank,
        pid=os.getpid(),
        threads=os.environ["OMP_NUM_THREADS"],
        full_error=os.environ.get("HYDRA_FULL_ERROR"),
    )
    for step in range(1, config.train.steps + 1):
        _misbehave(config.user, step, env)
        total = comm.sum_scalars([1.0, signals.requested() is not None], env)
        if total[1]:
            raise Preempted(f"asked to stop after step {step}; saved")
        if env.is_main:
            run.metric({"step": step, "loss": config.optim.lr / step, "tps": 100.0 * step})
        time.sleep(config.user.get("step_s", 0.0))
    if env.is_main:
        run.write_status(step=config.train.steps)
    return {"metric": config.optim.lr, "ranks": env.world_size}


def _misbehave(user: dict[str, Any], step: int, env: Env) -> None:
    if step != user.get("at", 1) or env.rank != user.get("rank", 0):
        return
    match user.get("fail"):
        case "error":
            raise RuntimeError("the roof is leaking")
        case "data":
            raise DataError("corpus.txt is missing", key="data.paths")
        case "non_finite":
            raise NonFiniteError("loss is nan")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)


def hang_in_collective(config: Config, run: RunDir, env: Env) -> None:
    """Rank 1 fails in a way that its peer cannot notice: the connection stays open, the peer waits for a store key."""
    if env.rank == 1:
        raise RuntimeError("the roof is leaking")
    dist.distributed_c10d._get_default_store().wait(["never"])
    raise AssertionError(torch)


def look(config: Config, run: RunDir | None, env: Env) -> None:
    """Stands in for ``runner=check``."""
    assert run is None and env.world_size == 1
    print(f"looked at {config.model.name}")


def leave_a_child(config: Config, run: RunDir, env: Env) -> None:
    """Ends while a process that it has started goes on, and has something to do at exit."""
    atexit.register(run.event, "exit", "here")
    child = subprocess.Popen(["sleep", "600"])
    run.event("child", "left", pid=child.pid)


class Slow:
    """A tracker of somebody else's: a thread of its own writes what came, slowly, once it is told of the end."""

    def __init__(self, run: RunDir, fails: bool) -> None:
        self.run, self.fails, self.steps, self.ends = run, fails, [], threading.Event()
        self.thread = threading.Thread(target=self._write)
        self.thread.start()

    def _write(self) -> None:
        self.ends.wait()
        time.sleep(0.2)
        (self.run.path / "slow.txt").write_text(f"{self.state} {self.steps}")

    def log(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])
        if self.fails:
            raise RuntimeError("the roof is leaking")

    def close(self, state: str) -> None:
        self.state = state
        self.ends.set()
        self.thread.join(10)


def track_slowly(config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """A training whose records also go to ``Slow``."""
    from titanyaml.runner import train as training  # a second of imports, which the other stand-ins need not wait for

    tracker.build = lambda config, run: tracker.Trackers(run, [Slow(run, "fail" in config.user)])
    return training.train(replace(config, model=replace(config.model, vocab_size=258)), run, env)
