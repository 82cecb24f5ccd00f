"""Ranks that act as one while a checkpoint is written or read: an error of one is an error of all.

They talk through a gloo group of their own: a slow file system must neither run into the short time-out of training
collectives nor take GPU memory.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titanyaml.distributed import compat
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError, TitanError

log = logging.getLogger("titanyaml")
T = TypeVar("T")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Peers:
    """All ranks, or one rank alone. Every method is called by all of them, in the same order.

    Args:
        timeout_s: how long a rank waits for the slowest one in one phase (seconds).
    """

    def __init__(self, env: Env, *, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = env.rank, env.world_size, timeout_s
        self.group = None
        if env.world_size > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, obj: T) -> list[T]:
        """Every rank's object (picklable), in rank order, on every rank."""
        if self.group is None:
            return [obj]
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, obj, group=self.group)
        return boxes

    def gather_to_main(self, obj: T) -> list[T]:
        """Every rank's object on rank 0; an empty list elsewhere."""
        if self.group is None:
            return [obj]
        boxes = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(obj, boxes, dst=0, group=self.group)
        return boxes or []

    def together(self, phase: str, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank; what each returned, in rank order.

        Raises:
            TitanError: the failure of the lowest failing rank, on every rank.
            CheckpointError: a rank did not finish in time; rank 0 names it.
        """
        result, error = None, None
        try:
            result = work()
        except (Exception, CheckpointException) as exception:
            error = self._translate(phase, exception)
        self.arrive(phase)
        answers = self.gather((error, result))
        for failure, _ in answers:
            if failure is not None:
                raise failure
        return [answer for _, answer in answers]

    def on_main(self, phase: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 only; its result, or its error, on every rank."""
        return self.together(phase, work if self.rank == 0 else lambda: None)[0]

    def arrive(self, phase: str) -> None:
        """Wait for the slowest rank.

        Raises:
            CheckpointError: on rank 0, naming the ranks that did not come; peers get gloo's own error.
        """
        if self.group is None:
            return
        # training shortens the limit of all groups once its first step is done
        compat.set_group_timeout(self.group, self.timeout_s)
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=self.timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"{phase}: not every rank finished within {self.timeout_s:g} s: {str(error).splitlines()[0]}"
            ) from error

    def _translate(self, phase: str, error: BaseException) -> TitanError:
        """The error as every rank is going to raise it."""
        if isinstance(error, TitanError):
            return error
        failures = error.failures if isinstance(error, CheckpointException) else {self.rank: (error, None)}
        rank, (cause, _) = min(failures.items())
        log.debug("checkpoint: %s failed", phase, exc_info=error)
        full = isinstance(cause, OSError) and cause.errno in NO_SPACE
        text = " ".join(str(cause).split()) or "no message"
        return CheckpointError(
            f"{phase} failed on rank {rank}: {'no space left to write: ' if full else ''}{type(cause).__name__}: {text}"
        )
