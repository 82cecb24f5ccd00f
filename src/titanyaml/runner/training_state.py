"""The state of a training run: what a checkpoint holds, reading it back, and the checks before the first step."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from titanyaml.checkpoint import Checkpointer
from titanyaml.config.schema import Config
from titanyaml.distributed import replica_checks
from titanyaml.distributed.env import Env
from titanyaml.models.moe import expert_biases
from titanyaml.optim import AdamW


def checkpoint_state(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """The tensors of a checkpoint: full-precision weights, router biases and optimizer state."""
    # split masters are joined into copies: after reading into those, ``optimizer.load`` splits them again
    return {"model": optimizer.weights() | expert_biases(model), "optim": optimizer.state_tensors()}


def restore(
    config: Config, model: nn.Module, optimizer: AdamW, checkpointer: Checkpointer
) -> tuple[int, dict[str, Any] | None]:
    """Load the checkpoint that ``checkpoint.resume`` names; returns its step and ``Batches.state``, or 0 and None."""
    path = _resume_path(config, checkpointer)
    if path is None:
        return 0, None
    state = checkpoint_state(model, optimizer)  # read into in place, shard by shard
    meta = checkpointer.load(path, state)
    optimizer.load(state["model"])
    return meta["step"], meta["data"]


def _resume_path(config: Config, checkpointer: Checkpointer) -> Path | None:
    resume = config.checkpoint.resume
    if resume == "none":
        return None
    return checkpointer.latest() if resume == "auto" else checkpointer.find(Path(resume))


def check_ranks(config: Config, model: nn.Module, optimizer: AdamW, env: Env, *, data_rank: int) -> None:
    """Refuse replicas of weights, buffers or optimizer state that differ, and data ranks that draw alike."""
    # both would train on in silence; one pass over the weights costs less than a step
    # a generator: the master of a split parameter is a copy, and one of them at a time is enough
    masters = ((name, optimizer.master(name)) for name in optimizer.names)
    moments = (
        (f"{name}.{kind}", tensor)
        for name, state in optimizer.state_tensors().items()
        for kind, tensor in state.items()
    )
    replica_checks.check_replicas_match(chain(masters, model.named_buffers(), moments), env)
    replica_checks.check_random_streams(config.run.seed, data_rank, env)
