"""Ranks that act as one while a checkpoint is written or read: an error of one rank is raised on all."""

import errno
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titanyaml.distributed import compat
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError, TitanError

log = logging.getLogger("titanyaml")
T = TypeVar("T")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Peers:
    """All ranks, or one alone; each method is called by all of them, in the same order. timeout_s: for one phase."""

    def __init__(self, env: Env, *, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = env.rank, env.world_size, timeout_s
        # gloo, and a group of its own: a slow file system must neither run into the short time-out of training
        # collectives nor take GPU memory
        self.group = None
        if env.world_size > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, obj: T) -> list[T]:
        """Every rank's object (picklable), in rank order, on every rank."""
        if self.group is None:
            return [obj]
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, obj, group=self.group)
        return objects

    def gather_to_main(self, obj: T) -> list[T]:
        """Every rank's object on rank 0; an empty list on the others."""
        if self.group is None:
            return [obj]
        objects: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(obj, objects, dst=0, group=self.group)
        return objects or []

    def run_on_all(self, phase: str, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank; the results in rank order, or the lowest failing rank's error on all."""
        result: T | None = None
        error: TitanError | None = None
        try:
            result = work()
        except (Exception, CheckpointException) as exception:
            error = self._translate(phase, exception)
        # a failed rank arrives too: otherwise its peers would wait for it until they time out
        self.wait_for_all(phase)
        outcomes = self.gather((error, result))
        for failure, _ in outcomes:
            if failure is not None:
                raise failure
        return [cast(T, outcome) for _, outcome in outcomes]

    def run_on_main(self, phase: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 only; its result, or its error, on every rank."""
        own_work: Callable[[], T | None] = work if self.rank == 0 else lambda: None
        return cast(T, self.run_on_all(phase, own_work)[0])

    def wait_for_all(self, phase: str) -> None:
        """Wait for the slowest rank. CheckpointError: on rank 0, naming the ranks that did not come in time."""
        if self.group is None:
            return
        # training shortens the limit of all groups once its first step is done
        compat.set_group_timeout(self.group, self.timeout_s)
        try:
            # a plain barrier or a gather would time out without saying for whom it waited
            dist.monitored_barrier(self.group, timedelta(seconds=self.timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{phase}: not every rank finished within {self.timeout_s:g} s: {reason}") from error

    def _translate(self, phase: str, error: BaseException) -> TitanError:
        """The error as every rank is going to raise it."""
        if isinstance(error, TitanError):
            return error
        # DCP collects the errors of all ranks into one
        failures = error.failures if isinstance(error, CheckpointException) else {self.rank: (error, None)}
        rank, (cause, _) = min(failures.items())
        log.debug("checkpoint: %s failed", phase, exc_info=error)
        is_full = isinstance(cause, OSError) and cause.errno in NO_SPACE
        text = " ".join(str(cause).split()) or "no message"
        reason = f"no space left to write: {type(cause).__name__}" if is_full else type(cause).__name__
        return CheckpointError(f"{phase} failed on rank {rank}: {reason}: {text}")
