"""The helper that runs functions on ranks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from titanyaml.errors import ConfigError


def summed(rank: int, factor: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return os.getpid(), total


def redistribute(rank: int, dims: int) -> None:
    """Have DTensor remember a mesh of so many groups."""
    mesh = init_device_mesh("cpu", (2,) + (1,) * (dims - 1))
    sharded, whole = ([first] + [Replicate()] * (dims - 1) for first in (Shard(0), Replicate()))
    distribute_tensor(torch.ones(4), mesh, sharded).redistribute(mesh, whole)


def threads(rank: int) -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def refuse(rank: int, culprit: int | None) -> None:
    if culprit in (None, rank):
        raise ConfigError("no", key="run.seed")
    dist.barrier()


def die(rank: int) -> None:
    if rank == 1:
        os._exit(7)


def sleep(rank: int) -> None:
    time.sleep(60 if rank == 1 else 0)


def test_results_come_in_rank_order_from_processes_that_are_reused() -> None:
    first, second = run_ranks(summed, 2, 10), run_ranks(summed, 2, 100)
    assert [total.item() for _, total in first] == [10, 10]
    assert [total.item() for _, total in second] == [100, 100]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert os.getpid() not in [pid for pid, _ in first]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_groups_that_are_gone_take_no_threads() -> None:
    before = [run_ranks(threads, 2) for _ in range(4)][-1]
    for dims in (2, 3, 4, 5):
        run_ranks(redistribute, 2, dims)
    after = [run_ranks(threads, 2) for _ in range(4)][-1]
    assert all(late < early + 6 for early, late in zip(before, after, strict=True)), "each group that is kept has three"


def test_an_error_on_all_ranks_is_raised_here_and_the_processes_live_on() -> None:
    before = run_ranks(summed, 2, 1)
    with pytest.raises(ConfigError, match="no") as caught:
        run_ranks(refuse, 2, None)
    assert "in refuse" in caught.value.__notes__[0]
    assert [pid for pid, _ in run_ranks(summed, 2, 1)] == [pid for pid, _ in before]


def test_one_rank_fails_while_the_other_waits_for_it() -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        run_ranks(refuse, 2, 1)
    assert "on rank 1" in caught.value.__notes__[0]
    assert time.monotonic() - begin < 30
    assert [total.item() for _, total in run_ranks(summed, 2, 1)] == [1, 1]


def test_a_dead_rank_and_a_silent_rank_are_told_apart() -> None:
    with pytest.raises(RuntimeError, match="exit code 7"):
        run_ranks(die, 2)
    run_ranks(summed, 2, 1)  # new processes take seconds to start
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[1\]"):
        run_ranks(sleep, 2, timeout_s=4)
