"""Saving and loading by several ranks, and across meshes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.conftest import equal, flip, make
from tests.ranks import run_ranks
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError, LaunchError, NonFiniteError

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def build(seed: int, *, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose dims do not divide by 2, trained one step, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    model(torch.randn(3, 5)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    named = dict(model.named_parameters())
    return {"model": named, "optim": {name: optimizer.state[p] for name, p in named.items()}}


def full(state: dict) -> dict:
    """Everything as plain whole tensors."""
    if isinstance(state, dict):
        return {name: full(value) for name, value in state.items()}
    state = state.detach()
    return (state.full_tensor() if isinstance(state, DTensor) else state).clone()


def save_sharded(rank: int, path: str, seed: int, steps: int) -> dict:
    env = Env.from_environ("cpu")
    checkpointer = make(Path(path), env=env)
    state = state_of(*build(seed, world_size=env.world_size))
    for step in range(1, steps + 1):
        checkpointer.save(step, state, {"position": step})
    return full(state)


def load_sharded(rank: int, path: str) -> tuple[str, dict]:
    env = Env.from_environ("cpu")
    checkpointer = make(Path(path), env=env)
    state = state_of(*build(99, world_size=env.world_size))
    newest = checkpointer.latest()
    checkpointer.load(newest, state)
    return newest.name, full(state)


def test_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    saved = run_ranks(save_sharded, 2, str(tmp_path), 1, 3)[0]
    folder = tmp_path / "checkpoints/step-00000003"
    assert {"__0_0.distcp", "__1_0.distcp"} <= {p.name for p in folder.iterdir()}
    alone, single = state_of(*build(5, world_size=1)), make(tmp_path)
    assert single.load(single.latest(), alone)["step"] == 3
    assert set(alone["model"]) == set(NAMES) and equal(full(alone), saved)
    single.save(4, alone, {"position": 4})
    for name, state in run_ranks(load_sharded, 2, str(tmp_path)):
        assert name == "step-00000004" and equal(state, saved)


def test_ranks_agree_on_the_older_one_when_a_share_is_damaged(tmp_path: Path) -> None:
    saved = run_ranks(save_sharded, 2, str(tmp_path), 1, 2)[0]
    flip(tmp_path / "checkpoints/step-00000002/__1_0.distcp")
    for name, state in run_ranks(load_sharded, 2, str(tmp_path)):
        assert name == "step-00000001" and equal(state, saved)


def save_where_one_fails(rank: int, path: str, how: str) -> tuple[str, str]:
    env = Env.from_environ("cpu")
    checkpointer = make(Path(path), env=env)
    state = {"model": {f"w{rank}": torch.ones(2)}}
    checkpointer.save(1, state, {})
    if how == "slow":  # the first one imports what it needs
        checkpointer = make(Path(path), env=env, timeout_s=2.0)
    given_up = Path(path) / "given_up"
    if rank == 1:
        sabotage(how, state, given_up)
    started = time.monotonic()
    try:
        checkpointer.save(2, state, {})
    except Exception as error:
        if how == "slow" and rank == 0:
            assert time.monotonic() - started < 15
        return type(error).__name__, str(error)
    finally:
        FileSystemWriter.write_data = REAL_WRITE
        if rank == 0:
            given_up.touch()
    return "", ""


REAL_WRITE = FileSystemWriter.write_data


def sabotage(how: str, state: dict, given_up: Path) -> None:
    def write_data(self, plan, planner):
        if how == "full":
            raise OSError(28, os.strerror(28))
        end = time.monotonic() + 30
        while not given_up.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return REAL_WRITE(self, plan, planner)

    if how == "nan":
        state["model"]["w1"][0] = torch.nan
    else:
        FileSystemWriter.write_data = write_data


@pytest.mark.parametrize(
    "how, kind, text",
    [
        ("full", CheckpointError, "writing failed on rank 1: no space left to write"),
        ("nan", NonFiniteError, "NaN or infinity in 1 tensors, first model/w1"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path, how: str, kind: type, text: str) -> None:
    for name, message in run_ranks(save_where_one_fails, 2, str(tmp_path), how):
        assert name == kind.__name__ and text in message
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert make(tmp_path).latest().name == "step-00000001"


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    (name, message), _ = run_ranks(save_where_one_fails, 2, str(tmp_path), "slow")
    assert name == "CheckpointError" and "within 2 s" in message and "1" in message.split("within 2 s")[1], message
    assert make(tmp_path).latest().name == "step-00000001"


def save_own_part(rank: int, path: str) -> list[str]:
    """Pipeline stages: each rank has its own names; loading with one missing or unknown anywhere is refused."""
    checkpointer = make(Path(path), env=Env.from_environ("cpu"))
    checkpointer.save(1, {"model": {f"layers.{rank}.w": torch.full((2,), float(rank))}}, {})
    state = {"model": {f"layers.{rank}.w": torch.zeros(2)}}
    checkpointer.load(Path(path), state)
    assert state["model"][f"layers.{rank}.w"].tolist() == [rank, rank]
    errors = []
    for wrong in ({"layers.0.w": torch.zeros(2)}, {f"layers.{rank}.w": torch.zeros(2), f"new.{rank}": torch.zeros(2)}):
        with pytest.raises(CheckpointError) as error:
            checkpointer.load(Path(path), {"model": wrong})
        errors.append(str(error.value))
    return errors


def test_key_sets_are_compared_over_all_ranks(tmp_path: Path) -> None:
    for unread, missing in run_ranks(save_own_part, 2, str(tmp_path)):
        assert "1 of its tensors are unknown to the model: model/layers.1.w" in unread
        assert "model/new.0" in missing and "model/new.1" in missing and "unknown" not in missing


def superseded(rank: int, path: str) -> str:
    checkpointer = make(Path(path), env=Env.from_environ("cpu"))
    checkpointer.run.generation = 7 if rank == 0 else 0  # nobody has claimed the folder: its generation is 0
    with pytest.raises(LaunchError, match="taken over") as error:
        checkpointer.save(1, {"model": {"w": torch.ones(2)}}, {})
    return str(error.value)


def test_all_ranks_of_a_superseded_run_stop(tmp_path: Path) -> None:
    assert len(set(run_ranks(superseded, 2, str(tmp_path)))) == 1
    assert list((tmp_path / "checkpoints").glob("*")) == []
