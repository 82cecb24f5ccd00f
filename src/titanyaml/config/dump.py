"""A configuration's three forms: Hydra's composed tree, dataclasses, the text of config.yaml; and its hash.

``to_dataclass`` and ``to_yaml`` convert the composed tree once, in the command line; everything below works on the
dataclasses. ``from_yaml`` and ``load`` read config.yaml back.

All of config.yaml is resolved except two kinds of expression. ``run.id`` and ``run.dir`` stay, so that a replay is a
new run in a new folder. Plugin nodes, or arguments of them, that refer to a group (``ac: ${ac}``) stay, so that an
override of the group still reaches the plugin. A ``defaults`` list on top brings the schema and Hydra's own settings.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf

from titanyaml.config import schema
from titanyaml.errors import ConfigError, Problem

#: What a replay composes below the file: the typed schema, and the settings of Hydra (conf/titan_hydra.yaml).
REPLAY_DEFAULTS = ["config_schema", "titan_hydra", "_self_"]

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
#: Sections that do not change a run's result.
_NOT_IN_HASH = ("sweep", "launch")


def to_dataclass(cfg: DictConfig) -> schema.Config:
    """The tree as dataclasses, resolved; plugin nodes and ``user`` are plain dicts."""
    typed = OmegaConf.merge(OmegaConf.structured(schema.Config), _plain(cfg))
    config = cast(schema.Config, OmegaConf.to_object(typed))
    config.pipeline.plugins = _plain(cfg.pipeline.plugins)  # with the types that references bring, not as text
    return config


def to_yaml(cfg: DictConfig) -> str:
    """The text of config.yaml, of a composed tree without Hydra's own node.

    Raises ConfigError if a value holds ``${`` as text, which would come alive when the file is read.
    """
    tree = _plain(cfg)
    if problems := _live_text(tree):
        raise ConfigError(problems)
    tree["run"].update(_run_expressions(cfg))
    plugins = tree["pipeline"]["plugins"]
    for name, node in _plain(cfg.pipeline.plugins, resolve=False).items():
        if _is_reference(node):
            plugins[name] = node
        elif isinstance(node, dict):
            plugins[name].update({argument: value for argument, value in node.items() if _is_reference(value)})
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": REPLAY_DEFAULTS, **tree}))


def from_yaml(text: str, *, run_id: str, run_dir: str) -> schema.Config:
    """The configuration of a config.yaml, as the run ``run_id`` in ``run_dir``."""
    tree = cast(DictConfig, OmegaConf.create(text))
    tree.pop("defaults", None)  # of Hydra: what a replay composes the file with
    # typed before it is resolved: the file may lack keys that this version's schema has
    cfg = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema.Config), tree))
    cfg.run.id, cfg.run.dir = run_id, run_dir
    return to_dataclass(cfg)


def load(path: Path, *, run_id: str, run_dir: str) -> schema.Config:
    """``from_yaml`` of a file."""
    return from_yaml(path.read_text(encoding="utf-8"), run_id=run_id, run_dir=run_dir)


def plugin_references(text: str) -> dict[str, str]:
    """Keys below ``pipeline.plugins`` of a config.yaml that only repeat another: ``pipeline.plugins.ac`` -> ``ac``."""
    nodes = yaml.safe_load(text)["pipeline"]["plugins"]
    values = {f"pipeline.plugins.{key}": value for key, value in leaves(nodes).items()}
    return {key: match[1] for key, value in values.items() if (match := _REFERENCE.fullmatch(str(value)))}


def config_hash(config: schema.Config) -> str:
    """SHA-256 of the configuration without what does not change a result: run.id, run.dir, sweep.*, launch.*."""
    tree = {name: node for name, node in dataclasses.asdict(config).items() if name not in _NOT_IN_HASH}
    tree["run"] = {name: value for name, value in tree["run"].items() if name not in ("id", "dir")}
    # sorted: where a key stands in the schema is no part of a run's identity
    return hashlib.sha256(json.dumps(_with_text_keys(tree), sort_keys=True).encode()).hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ: (old value, new value); an absent one is null."""
    before, after = leaves(old), leaves(new)
    return {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}


def changes_since(path: Path, config: schema.Config) -> dict[str, tuple[Any, Any]]:
    """How ``config`` differs from the config.yaml at ``path``, run.id and run.dir apart; ConfigError if the file is no
    configuration of this version."""
    try:
        old = load(path, run_id=config.run.id, run_dir=config.run.dir)
    except Exception as error:  # OmegaConf, PyYAML and the schema each have exceptions of their own
        raise ConfigError(f"{path} is not a configuration of this version: {error}", key="run.dir") from error
    return changes(dataclasses.asdict(old), dataclasses.asdict(config))


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to value; a list, an empty dict and null are values."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    values: dict[str, Any] = {}
    for name, value in node.items():
        values.update(leaves(value, f"{prefix}.{name}" if prefix else str(name)))
    return values


def _plain(cfg: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=resolve))


def _live_text(tree: dict[str, Any]) -> list[Problem]:
    return [
        Problem(key, f"{value!r} holds '${{', which config.yaml would read as an expression", hint="another text")
        for key, value in leaves(tree).items()
        if isinstance(value, str) and "${" in value
    ]


def _run_expressions(cfg: DictConfig) -> dict[str, str]:
    """``run.id`` and ``run.dir`` for a replay: the user's patterns where they give a new run, else the defaults."""
    literal, default = _plain(cfg.run, resolve=False), schema.Run()
    return {
        "id": literal["id"] if "${now:" in str(literal["id"]) else default.id,
        "dir": literal["dir"] if "${run.id}" in str(literal["dir"]) else default.dir,
    }


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def _with_text_keys(node: Any) -> Any:
    """A copy that JSON can sort: ``user`` may have numbers among its keys."""
    if isinstance(node, dict):
        return {str(name): _with_text_keys(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_with_text_keys(value) for value in node]
    return node if isinstance(node, str | int | float | bool | None) else str(node)
