"""A trained model from a checkpoint, for ``runner=eval`` and ``runner=sample``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from titanyaml.config import dump
from titanyaml.config.checkpoint_config import override_key, run_folder_of
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError
from titanyaml.rundir import RunDir
from titanyaml.runner import setup

if TYPE_CHECKING:
    from titanyaml.runner.setup import BuiltModel

#: Keys of ``train`` that come from the checkpoint unless they are typed.
_TRAIN_KEYS = ("seq_len", "param_dtype", "compute_dtype", "reduce_dtype")


def adopt_trained(config: Config, run: RunDir) -> tuple[Config, Path]:
    """Give ``config`` the model, the tokenizer and, unless typed, text, dtypes and sequence length of a trained run.

    Returns:
        The configuration, and the path of the checkpoint.

    Raises:
        CheckpointError: there is no run or checkpoint at ``runner.checkpoint``.
    """
    assert config.runner.checkpoint is not None, "a rule refuses runner=eval and runner=sample without it"
    checkpoint, run_folder = Path(config.runner.checkpoint), run_folder_of(config.runner.checkpoint)
    if not (run_folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{checkpoint} is neither a run folder nor a checkpoint in one",
            key="runner.checkpoint",
            hint="runner.checkpoint=outputs/<run.name>/<run.id>",
        )
    trained = dump.load(run_folder / "config.yaml", run_id=run_folder.name, run_dir=str(run_folder))
    typed = typed_groups(run)
    groups = ("model", "tokenizer") if "data" in typed else ("model", "tokenizer", "data")
    train_values = {key: getattr(trained.train, key) for key in _TRAIN_KEYS if f"train.{key}" not in typed}
    adopted = {group: getattr(trained, group) for group in groups}
    return dataclasses.replace(config, **adopted, train=dataclasses.replace(config.train, **train_values)), checkpoint


def typed_groups(run: RunDir) -> set[str]:
    """Groups and keys of the command line: ``model=x model.dim=8`` -> {"model", "model.dim"}."""
    overrides = yaml.safe_load((run.path / "overrides.yaml").read_text()).get("overrides", [])
    keys = {override_key(override) for override in overrides}
    return keys | {key.split(".")[0] for key in keys}


def load_weights(built: BuiltModel, path: Path, *, config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Read the checkpoint's weights into the model; returns its meta data."""
    weights = built.weights()
    checkpointer = setup.build_checkpointer(config, run, env)
    meta = checkpointer.load(path, {"model": weights}, only=("model",))  # optimizer state is left on disk
    built.load(weights)
    return meta
