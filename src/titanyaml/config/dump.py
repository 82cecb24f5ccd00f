"""config.yaml: the configuration as it ran, such that it can be run again.

Two things stay expressions where all else is resolved: ``run.id`` and ``run.dir``, so that a replay is a new run in a
new folder, and the plugin nodes, and arguments of them, that refer to a group (``ac: ${ac}``), so that an override of
the group still reaches the plugin. A ``defaults`` list on top brings the schema and Hydra's own settings, which are not
part of a run's identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from titanyaml.config import schema
from titanyaml.errors import ConfigError, Problem

#: What a replay composes below the file: the typed schema, and the settings of Hydra (conf/titan_hydra.yaml).
REPLAY_DEFAULTS = ["config_schema", "titan_hydra", "_self_"]

_REFERENCE = re.compile(r"\$\{[A-Za-z_][\w.]*\}")
_NOT_IDENTITY = ("sweep", "launch")


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The tree as plain values, every interpolation resolved."""
    return OmegaConf.to_container(cfg, resolve=True)


def to_yaml(cfg: DictConfig) -> str:
    """The text of config.yaml.

    Args:
        cfg: the composed tree without Hydra's own node.

    Raises:
        ConfigError: a value holds ``${`` as text, which would come alive when the file is read.
    """
    if problems := refuse_live_text(cfg):
        raise ConfigError(problems)
    tree = resolved(cfg)
    tree["run"].update(_run_expressions(cfg))
    plugins = tree["pipeline"]["plugins"]
    for name, node in OmegaConf.to_container(cfg.pipeline.plugins, resolve=False).items():
        if _is_reference(node):
            plugins[name] = node
        elif isinstance(node, dict):
            plugins[name].update({argument: value for argument, value in node.items() if _is_reference(value)})
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": REPLAY_DEFAULTS, **tree}))


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def _run_expressions(cfg: DictConfig) -> dict[str, str]:
    """``run.id`` and ``run.dir`` for a replay: what was typed where that gives a new run, else the defaults."""
    raw = OmegaConf.to_container(cfg.run, resolve=False)
    default = schema.Run()
    return {
        "id": raw["id"] if "${now:" in str(raw["id"]) else default.id,
        "dir": raw["dir"] if "${run.id}" in str(raw["dir"]) else default.dir,
    }


def refuse_live_text(cfg: DictConfig) -> list[Problem]:
    """Problems of values that hold ``${`` as text: written to config.yaml they would be read as expressions."""
    return [
        Problem(key, f"{value!r} holds '${{', which config.yaml would read as an expression", hint="another text")
        for key, value in leaves(resolved(cfg)).items()
        if isinstance(value, str) and "${" in value
    ]


def read(path: Path, *, run_id: str, run_dir: str) -> DictConfig:
    """The typed tree of the config.yaml at ``path``, as the run ``run_id`` in ``run_dir``."""
    return parse(path.read_text(encoding="utf-8"), run_id=run_id, run_dir=run_dir)


def parse(text: str, *, run_id: str, run_dir: str) -> DictConfig:
    """The same for the text of a config.yaml."""
    tree = OmegaConf.create(text)
    with open_dict(tree):
        tree.pop("defaults", None)
    cfg = OmegaConf.merge(OmegaConf.structured(schema.Config), tree)
    cfg.run.id, cfg.run.dir = run_id, run_dir
    return cfg


def load(path: Path, *, run_id: str, run_dir: str) -> schema.Config:
    """``read`` as plain dataclasses: what ranks work with."""
    return to_dataclass(read(path, run_id=run_id, run_dir=run_dir))


def to_dataclass(cfg: DictConfig) -> schema.Config:
    """The tree as dataclasses, resolved; plugin nodes and ``user`` as plain dicts."""
    typed = OmegaConf.merge(OmegaConf.structured(schema.Config), resolved(cfg))
    config = OmegaConf.to_object(typed)
    config.pipeline.plugins = resolved(cfg.pipeline.plugins)
    return config


def config_hash(cfg: DictConfig) -> str:
    """SHA-256 of the resolved tree without what does not change a result: run.id, run.dir, sweep.*, launch.*."""
    return _hash(resolved(cfg))


def dataclass_hash(config: schema.Config) -> str:
    """``config_hash`` of a tree of dataclasses."""
    return _hash(dataclasses.asdict(config))


def _hash(tree: dict[str, Any]) -> str:
    kept = {name: node for name, node in tree.items() if name not in _NOT_IDENTITY}
    kept["run"] = {name: value for name, value in tree["run"].items() if name not in ("id", "dir")}
    return hashlib.sha256(json.dumps(_string_keys(kept), sort_keys=True).encode()).hexdigest()


def _string_keys(node: Any) -> Any:
    if isinstance(node, dict):
        return {str(name): _string_keys(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_string_keys(value) for value in node]
    return node if isinstance(node, str | int | float | bool | None) else str(node)


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to value; a list, an empty dict and null are values."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    found: dict[str, Any] = {}
    for name, value in node.items():
        found.update(leaves(value, f"{prefix}.{name}" if prefix else str(name)))
    return found


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ: (old value, new value); an absent one is null."""
    before, after = leaves(old), leaves(new)
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """``changes`` as lines to read."""
    return [f"{key}: {was!r} -> {now!r}" for key, (was, now) in changes(old, new).items()]


def changed(cfg: DictConfig, path: Path) -> dict[str, tuple[Any, Any]]:
    """How ``cfg`` differs from the config.yaml at ``path``; the same run's id and folder are no difference.

    Raises:
        ConfigError: the file cannot be read as a configuration of this version.
    """
    try:
        old = resolved(read(path, run_id=cfg.run.id, run_dir=cfg.run.dir))
    except Exception as error:
        raise ConfigError(f"{path} is not a configuration of this version: {error}", key="run.dir") from error
    return changes(old, resolved(cfg))
