"""Checkpoints of one mesh on another: weights, masters and moments bit for bit, there and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.conftest import make
from tests.plugins.parity import TP, Case, cp, train, whole
from tests.plugins.small import FSDP, build
from tests.ranks import run_ranks
from titanyaml import optim
from titanyaml.config import schema
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims

UNEVEN = {"ffn_dim": 54, "vocab_size": 98}
FROM = Case(ParallelDims(dp_shard=4), {"fsdp": FSDP}, 1, UNEVEN)
MESHES = {
    "single": Case(ParallelDims(), {}, 1, UNEVEN),
    "tp2": Case(ParallelDims(tp=2), {"tp": TP}, 1, UNEVEN),
    "fsdp2_tp2": Case(ParallelDims(dp_shard=2, tp=2), {"tp": TP, "fsdp": FSDP}, 1, UNEVEN),
    "cp2": Case(ParallelDims(cp=2), {"cp": cp("ring"), "fsdp": FSDP}, 1, UNEVEN),
}


def carry(rank: int, case: Case, source: str | None, target: str) -> dict[str, Tensor]:
    """Load the newest checkpoint of ``source`` (None: train some steps), save to ``target``; the whole state."""
    env = Env.from_environ("cpu", environ=os.environ if case.dims.world_size > 1 else {})
    mesh = case.dims.build("cpu") if case.dims.world_size > 1 else None
    built = build(case.nodes, model_spec=case.spec(), dims=case.dims, mesh=mesh)
    optimizer = optim.build(
        schema.Optim(), dict(built.model.named_parameters()), masters=built.masters, device=built.ctx.device
    )
    if source is None:
        train(built, case, env, optimizer)
    state = {"model": {n: optimizer.master(n).detach() for n in optimizer.names}, "optim": optimizer.state_tensors()}
    if source is not None:
        with torch.no_grad():
            for _, tensor in flat(state):
                tensor.fill_(7.0)
        checkpoints = make(Path(source), env=env)
        checkpoints.load(checkpoints.latest(), state)
    make(Path(target), env=env).save(1, state, {"position": 0})
    return {name: whole(tensor) for name, tensor in flat(state)}


def flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Dotted name and tensor of a nested state."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    folder = str(tmp_path_factory.mktemp("fsdp4"))
    return folder, run_ranks(carry, 4, FROM, None, folder)[0]


@pytest.mark.parametrize("name", MESHES)
def test_there_and_back_again(tmp_path: Path, trained: tuple[str, dict[str, Tensor]], name: str) -> None:
    folder, saved = trained
    case, resharded, back = MESHES[name], str(tmp_path / "there"), str(tmp_path / "back")
    ranks = case.dims.world_size
    states = run_ranks(carry, ranks, case, folder, resharded) if ranks > 1 else [carry(0, case, folder, resharded)]
    states += run_ranks(carry, 4, FROM, resharded, back)
    assert len(saved) > 100, "weights and two moments"
    for state in states:
        assert state.keys() == saved.keys()
        assert [name for name, value in saved.items() if not torch.equal(state[name], value)] == []
