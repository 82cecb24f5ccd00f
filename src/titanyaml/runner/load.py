"""A trained model from a checkpoint, for the runners that read one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from titanyaml.config import dump
from titanyaml.config.schema import Config
from titanyaml.config.trained import home_of, typed_key
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError
from titanyaml.rundir import RunDir
from titanyaml.runner import setup

if TYPE_CHECKING:
    from titanyaml.runner.setup import Built

#: Keys of ``train`` that are the checkpoint's unless they are typed.
_TRAIN = ("seq_len", "param_dtype", "compute_dtype", "reduce_dtype")


def adopt_trained(config: Config, run: RunDir) -> tuple[Config, Path]:
    """The configuration with model, tokenizer and (unless typed) text, dtypes and sequence length of the checkpoint's
    run; and the checkpoint.

    Raises:
        CheckpointError: there is no run or checkpoint at ``runner.checkpoint``.
    """
    checkpoint, home = Path(config.runner.checkpoint), home_of(config.runner.checkpoint)
    if not (home / "config.yaml").is_file():
        raise CheckpointError(
            f"{checkpoint} is neither a run folder nor a checkpoint in one",
            key="runner.checkpoint",
            hint="runner.checkpoint=outputs/<run.name>/<run.id>",
        )
    trained = dump.load(home / "config.yaml", run_id=home.name, run_dir=str(home))
    typed = typed_groups(run)
    kept = {group: getattr(trained, group) for group in ("model", "tokenizer")}
    if "data" not in typed:
        kept["data"] = trained.data
    brought = {key: getattr(trained.train, key) for key in _TRAIN if f"train.{key}" not in typed}
    train = dataclasses.replace(config.train, **brought)
    return dataclasses.replace(config, **kept, train=train), checkpoint


def typed_groups(run: RunDir) -> set[str]:
    """Groups and keys that the command line named: ``model=x model.dim=8`` -> {"model", "model.dim"}."""
    overrides = yaml.safe_load((run.path / "overrides.yaml").read_text()).get("overrides", [])
    keys = {typed_key(text) for text in overrides}
    return keys | {key.split(".")[0] for key in keys}


def load_weights(built: Built, path: Path, *, config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Fill the built model from the checkpoint; the checkpoint's meta data."""
    weights = built.weights()
    meta = setup.checkpointer(config, run, env).load(path, {"model": weights}, only=("model",))
    built.load(weights)
    return meta
