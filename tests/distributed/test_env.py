from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from titanyaml.distributed.env import Env, set_timeout, start, stop
from titanyaml.errors import LaunchError


def places(**names: object) -> dict[str, str]:
    return {name: str(value) for name, value in names.items()}


def test_an_empty_environment_is_one_rank_alone() -> None:
    env = Env.from_environ("cpu", environ={})
    assert env == Env(0, 1, 0, torch.device("cpu"), "gloo")
    assert env.is_main
    start(env, timeout_s=1)
    assert not dist.is_initialized()
    set_timeout(1)
    stop(env)


def test_the_environment_of_torchrun() -> None:
    env = Env.from_environ("cpu", environ=places(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1))
    assert (env.rank, env.world_size, env.local_rank, env.is_main) == (5, 8, 1, False)


@pytest.mark.parametrize(
    "environ",
    [
        places(RANK=0, WORLD_SIZE=2),
        places(RANK=2, WORLD_SIZE=2, LOCAL_RANK=0),
        places(RANK=0, WORLD_SIZE=2, LOCAL_RANK=1),
        places(RANK="x", WORLD_SIZE=2, LOCAL_RANK=0),
        places(RANK=-1, WORLD_SIZE=2, LOCAL_RANK=0),
    ],
    ids=str,
)
def test_a_senseless_environment_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE=2"):
        Env.from_environ("cpu", environ=environ)


def test_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environ = places(RANK=2, WORLD_SIZE=3, LOCAL_RANK=2)
    with pytest.raises(LaunchError, match="2 GPUs") as caught:
        Env.from_environ("cuda", environ=environ)
    assert caught.value.hint == "launch.nproc=2"
    env = Env.from_environ("cuda", environ=environ | places(LOCAL_RANK=1))
    assert (env.device, env.backend) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")


def times_out(rank: int, given_up: Path) -> float:
    """Seconds after which two collectives that rank 1 never joins give up, under a limit shortened from 60 s."""
    group = dist.new_group([0, 1])
    set_timeout(1.0)
    begin = time.monotonic()
    if rank == 1:
        while not given_up.exists() and time.monotonic() < begin + 30:  # alive, but busy elsewhere
            time.sleep(0.05)
    else:
        for target in (None, group):
            with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
                dist.all_reduce(torch.ones(1), group=target)
    seconds = time.monotonic() - begin
    given_up.touch()
    dist.destroy_process_group()  # no barrier: the group is of no use any more
    return seconds


def test_set_timeout_reaches_every_live_group(tmp_path: Path) -> None:
    seconds = run_ranks(times_out, 2, tmp_path / "given_up")
    assert 2.0 <= seconds[0] < 15.0


def starts_and_stops(rank: int) -> list[bool]:
    env = Env.from_environ("cpu")
    before = dist.is_initialized()
    start(env, timeout_s=30)
    during = dist.is_initialized() and dist.get_backend() == "gloo" and dist.get_rank() == rank
    stop(env)
    return [before, during, dist.is_initialized()]


def test_start_and_stop() -> None:
    assert run_ranks(starts_and_stops, 2, start=False) == [[False, True, False]] * 2
