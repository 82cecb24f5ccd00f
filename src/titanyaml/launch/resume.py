"""May a configuration go on with a run that another one began?

What only says how far, how often, how fast or where may change freely. What changes the mathematics may not, unless
``checkpoint.accept_changes`` names it. The mesh and the batches may change as long as a step still sees equally many
sequences.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from titanyaml.config import dump
from titanyaml.config.schema import Config
from titanyaml.errors import ConfigError, Problem
from titanyaml.rundir import RunDir

#: Keys, and groups of keys, that may differ.
FREE = (
    "train.steps", "train.log_every", "train.gc_every", "validation", "checkpoint", "tracker", "hardware", "launch",
    "sweep", "user", "ac", "pipeline.plugins.ac", "loss.chunk_tokens", "data.prefetch", "data.cache_dir",
    "parallel.fsdp_reshard_after_forward", "pipeline.plugins.fsdp.reshard_after_forward",
)
#: Keys that may differ where the sequences of a step stay equally many.
FREE_WITH_EQUAL_BATCH = ("parallel", "train.local_batch", "train.global_batch")


def under(key: str, names: tuple[str, ...] | list[str]) -> bool:
    """Whether ``key`` is one of ``names`` or below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def accept(cfg: DictConfig, config: Config, run: RunDir, *, global_batch: int) -> dict[str, tuple[Any, Any]]:
    """How ``cfg`` differs from what ``run`` recorded: dotted key to (old, new), empty for a new folder.

    Args:
        config: ``cfg`` as dataclasses.
        global_batch: sequences of a step under ``cfg``.

    Raises:
        ConfigError: a difference that would make the rest of the run another run.
    """
    path = run.path / "config.yaml"
    if not path.exists():
        if config.checkpoint.resume != "none" and any((run.path / "checkpoints").glob("step-*")):
            raise ConfigError(
                f"{run.path} holds checkpoints but no config.yaml: what they were begun with is unknown",
                key="run.id", hint=f"put the file back, or another run.id and checkpoint.resume={run.path}",
            )
        return {}
    changes = dump.changed(cfg, path)
    free = [*FREE, *config.checkpoint.accept_changes]
    if run.status().get("global_batch") == global_batch:
        free += FREE_WITH_EQUAL_BATCH
    refused = [key for key in changes if not under(key, free)]
    if refused:
        accepted = ",".join([*config.checkpoint.accept_changes, *refused])
        raise ConfigError([
            Problem(
                key, f"is {changes[key][1]!r}, but {run.path} was begun with {changes[key][0]!r}",
                hint=f"{key}={changes[key][0]}, another run.id, or 'checkpoint.accept_changes=[{accepted}]'",
            )
            for key in refused
        ])
    return changes


def is_finished(run: RunDir, changes: dict[str, tuple[Any, Any]], *, steps: int) -> bool:
    """Whether nothing is left to do: the run is done, and was not extended since."""
    status = run.status()
    return status.get("state") == "done" and ("train.steps" not in changes or status.get("step", 0) >= steps)
