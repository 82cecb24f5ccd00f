"""May a configuration go on with a run that another one began?

What only says how far, how often, how fast or where may change freely. What changes the mathematics may not, unless
``checkpoint.accept_changes`` names it. The mesh and the batches may change as long as a step still sees equally many
sequences.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from titanyaml.config import dump
from titanyaml.config.checkpoint_config import override_key
from titanyaml.config.schema import Config
from titanyaml.errors import ConfigError, Problem
from titanyaml.rundir import RunDir

#: Keys, and groups of keys, that may differ.
FREE = (
    "train.steps",
    "train.log_every",
    "train.gc_every",
    "validation",
    "checkpoint",
    "tracker",
    "hardware",
    "launch",
    "sweep",
    "user",
    "ac",
    "pipeline.plugins.ac",
    "loss.chunk_tokens",
    "optim.master",
    "pipeline.plugins.fsdp.master",
    "data.prefetch",
    "data.cache_dir",
    "profile",
    "compile.cache_dir",
    "pipeline.plugins.compile.cache_dir",
    "parallel.fsdp_reshard_after_forward",
    "pipeline.plugins.fsdp.reshard_after_forward",
    "parallel.fsdp_reuse_memory",
    "pipeline.plugins.fsdp.reuse_memory",
)
#: Keys that a saved position in the data depends on: nothing can accept another value.
FIXED = ("train.seq_len",)
#: Groups that a checkpoint brings along for the runners that read one.
BROUGHT = ("model", "tokenizer")
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
                key="run.id",
                hint=f"put the file back, or another run.id and checkpoint.resume={run.path}",
            )
        return {}
    changes = dump.changed(cfg, path)
    accepted = config.checkpoint.accept_changes
    free = [*FREE, *FREE_WITH_EQUAL_BATCH, *accepted]
    refused = {
        key: (f"is {new!r}, but {run.path} was begun with {old!r}", f"{key}={old}")
        for key, (old, new) in changes.items()
        if under(key, FIXED) or not under(key, free)
    }
    begun_with = run.status().get("global_batch", global_batch)
    if begun_with != global_batch and not under("train.global_batch", accepted):
        # told by what matters, whichever of the batch and mesh keys it came from
        words = f"a step would see {global_batch} sequences, but {run.path} was begun with {begun_with}"
        refused["train.global_batch"] = words, f"train.global_batch={begun_with} (on any mesh)"
    acceptable = [*accepted, *(key for key in refused if not under(key, FIXED))]
    accept = f", or 'checkpoint.accept_changes=[{','.join(acceptable)}]'"
    problems = [
        Problem(key, words, hint=f"{way_out}, another run.id{'' if under(key, FIXED) else accept}")
        for key, (words, way_out) in refused.items()
    ]
    if problems:
        raise ConfigError(problems)
    return changes


def refuse_what_the_checkpoint_brings(config: Config, overrides: list[str]) -> None:
    """``runner=eval`` and ``sample`` take model and tokenizer from ``runner.checkpoint``.

    Raises:
        ConfigError: one of them was typed; all that were, by the keys as they were typed.
    """
    if config.runner.checkpoint is None:
        return
    typed = {override_key(text): text for text in overrides}
    problems = [
        Problem(key, f"is fixed by the checkpoint {config.runner.checkpoint}", hint=f"leave out {text}")
        for key, text in typed.items()
        if under(key, BROUGHT)
    ]
    if problems:
        raise ConfigError(problems)


def is_finished(run: RunDir, changes: dict[str, tuple[Any, Any]], *, steps: int) -> bool:
    """Whether nothing is left to do: the run is done, and was not extended since."""
    status = run.status()
    return status.get("state") == "done" and ("train.steps" not in changes or status.get("step", 0) >= steps)
