"""Small states and checkpointers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from titanyaml.checkpoint import Checkpointer
from titanyaml.distributed.env import Env
from titanyaml.rundir import RunDir

ALONE = Env(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), backend="gloo")


def make(path: Path, *, keep: int = 2, env: Env = ALONE, run: RunDir | None = None, **kwargs: Any) -> Checkpointer:
    """A checkpointer of the run folder ``path``."""
    return Checkpointer(run or RunDir(path), keep=keep, config_hash="c0ffee", env=env, **kwargs)


def make_state(seed: int) -> dict[str, Any]:
    """Weights and moments drawn from ``seed``, in several dtypes and ranks."""
    draw = torch.Generator().manual_seed(seed)
    weights = {
        "norm.weight": torch.randn(7, generator=draw),
        "layers.0.w": torch.randn(6, 5, generator=draw),
        "half": torch.randn(3, 4, generator=draw).bfloat16(),
        "empty": torch.zeros(0, 4),
    }
    moments = {
        name: {"exp_avg": torch.randn(w.shape, generator=draw), "step": torch.tensor(float(seed))}
        for name, w in weights.items()
    }
    return {"model": weights, "optim": moments}


def equal(a: Any, b: Any) -> bool:
    """Whether two states are the same bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    return a.dtype == b.dtype and torch.equal(a, b)


def flip(path: Path, *, offset: int = -100) -> None:
    """Change one bit of a file; its size stays."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
