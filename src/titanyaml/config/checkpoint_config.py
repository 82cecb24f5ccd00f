"""The configuration that a checkpoint was trained with, as far as the check of another run needs it."""

from pathlib import Path
from typing import Any

import yaml


def override_key(override: str) -> str:
    """The key or group that an override names: ``+model@x=y`` -> ``model``."""
    return override.lstrip("+~").split("=", 1)[0].split("@")[0]


def run_folder_of(checkpoint: str) -> Path:
    """The run folder of a checkpoint: itself, or two folders above; it may hold no config.yaml."""
    path = Path(checkpoint).expanduser()
    return path if (path / "config.yaml").is_file() else path.parent.parent


def with_checkpoint_config(values: dict[str, Any]) -> dict[str, Any]:
    """A tree's values, with model, tokenizer and sequence length of the checkpoint that its runner reads.

    Unchanged if the runner reads none or its file cannot be read: whoever loads the checkpoint reports that.
    """
    runner = values.get("runner") or {}
    if runner.get("name") not in ("eval", "sample") or not runner.get("checkpoint"):
        return values
    try:
        trained = yaml.safe_load((run_folder_of(runner["checkpoint"]) / "config.yaml").read_text(encoding="utf-8"))
        # merged: a checkpoint of an older version lacks keys that were added since
        replaced = {group: {**values[group], **trained[group]} for group in ("model", "tokenizer")}
        replaced["train"] = values["train"] | {"seq_len": trained["train"]["seq_len"]}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return values
    texts = [value for group in ("model", "tokenizer") for value in replaced[group].values() if isinstance(value, str)]
    if any("${" in text for text in texts):
        return values  # not a config.yaml of ours, which is resolved
    return values | replaced
