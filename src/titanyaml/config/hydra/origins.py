"""Where a value came from: the override that was typed, or the line of a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml
from omegaconf import Container, DictConfig, OmegaConf

from titanyaml.config.hydra.search_path import CONF_PACKAGE


@dataclass(frozen=True)
class File:
    """One merged YAML file.

    Args:
        source: of the search path, e.g. ``pkg://titanyaml.conf``. path: in it, without ``.yaml``.
        package: dotted place of its content, "" for the root. config: content.
    """

    source: str
    path: str
    package: str
    config: Container

    def holds(self, key: str) -> list[str] | None:
        """The key as a path inside the file, None where the file does not set it."""
        names, place = key.split("."), [name for name in self.package.split(".") if name not in ("", "_global_")]
        if names[: len(place)] != place or not isinstance(self.config, DictConfig):
            return None
        here: Any = OmegaConf.to_container(self.config, resolve=False, throw_on_missing=False)
        inside = names[len(place) :]
        for name in inside:
            if not isinstance(here, dict) or name not in here:
                return None
            here = here[name]
        return inside or None

    @property
    def is_ours(self) -> bool:
        """A shipped option or a mesh name: what was typed says more than the line of such a file."""
        return self.source.startswith(("mesh://", f"pkg://{CONF_PACKAGE}"))

    def location(self, inside: list[str]) -> str:
        """``path:line`` of a key in the file, as short as the current folder allows."""
        scheme, _, root = self.source.partition("://")
        if scheme == "mesh":
            return f"the mesh name {self.path.replace('/', '=')}"
        if scheme == "file":
            name = os.path.join(root, f"{self.path}.yaml")
        else:
            inner = self.path.removeprefix("experiment/") if scheme == "experiments" else self.path
            name = str(resources.files(root).joinpath(f"{inner}.yaml"))
        short = os.path.relpath(name)
        name = name if short.startswith("..") else short
        line = _line(name, inside)
        return f"{name}:{line}" if line else name


def _line(name: str, inside: list[str]) -> int | None:
    """Line of a key in a YAML file, None where it cannot be told."""
    try:
        with open(name, encoding="utf-8") as stream:
            node = yaml.compose(stream)
    except (OSError, yaml.YAMLError):
        return None
    line = None
    for wanted in inside:
        if not isinstance(node, yaml.MappingNode):
            return line
        pair = next((pair for pair in node.value if pair[0].value == wanted), None)
        if pair is None:
            return line
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


class Origins:
    """Answers where a key got its value; files are read at the first question only."""

    def __init__(self, overrides: list[tuple[str, str]], files: Callable[[], list[File]]) -> None:
        """``overrides``: (key, text that was typed), in order. ``files``: those merged, first to last."""
        self._overrides, self._read = overrides, files
        self._files: list[File] | None = None

    def of(self, key: str) -> str:
        """The override or ``file:line`` that gave ``key`` its value; "" for the schema's own default."""
        plain = key.partition("[")[0]
        # a key that was typed wins over any option, whichever came first; of nested ones the last does
        for name, text in reversed(self._overrides):
            if (plain == name or plain.startswith(f"{name}.")) and (name == plain or "{" in text):
                return f"override {text!r}"
        chosen = next((text for name, text in reversed(self._overrides) if plain.startswith(f"{name}.")), "")
        if self._files is None:
            self._files = self._read()
        for file in reversed(self._files):
            inside = file.holds(plain)
            if inside is not None and not (chosen and file.is_ours):
                return file.location(inside)
        return f"override {chosen!r}" if chosen else ""
