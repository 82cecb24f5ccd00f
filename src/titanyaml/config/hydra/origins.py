"""Where a value came from: the override that was typed, or the line of a file."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml
from omegaconf import Container, DictConfig, OmegaConf

from titanyaml.config.hydra.search_path import CONF_PACKAGE
from titanyaml.config.schema_keys import is_under


@dataclass(frozen=True)
class ConfigFile:
    """One merged YAML file.

    Args:
        source: of the search path, e.g. ``pkg://titanyaml.conf``. path: in it, without ``.yaml``.
        package: dotted key below which its content is merged, "" for the root. config: content.
    """

    source: str
    path: str
    package: str
    config: Container

    def holds(self, key: str) -> list[str] | None:
        """The key as a path inside the file, None if the file does not set it."""
        # an "@package" header or a group's own name says below which key the content is merged
        names, package = key.split("."), [name for name in self.package.split(".") if name not in ("", "_global_")]
        if names[: len(package)] != package or not isinstance(self.config, DictConfig):
            return None
        value: Any = OmegaConf.to_container(self.config, resolve=False, throw_on_missing=False)
        inside = names[len(package) :]
        for name in inside:
            if not isinstance(value, dict) or name not in value:
                return None
            value = value[name]
        return inside or None

    @property
    def is_ours(self) -> bool:
        """A shipped option or a mesh name: the override that chose it says more than the line of such a file."""
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
        relative = os.path.relpath(name)
        name = name if relative.startswith("..") else relative
        line = _find_line(name, inside)
        return f"{name}:{line}" if line else name


def _find_line(name: str, inside: list[str]) -> int | None:
    """Line of a key in a YAML file, or of the innermost section around it; None if the file cannot be read."""
    try:
        with open(name, encoding="utf-8") as stream:  # compose keeps line numbers, load does not
            node = yaml.compose(stream)
    except (OSError, yaml.YAMLError):
        return None
    line = None
    for key in inside:
        if not isinstance(node, yaml.MappingNode):
            return line
        pair = next((pair for pair in node.value if pair[0].value == key), None)
        if pair is None:
            return line
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


class Origins:
    """Tells where a key got its value; files are read at the first question only, since most commands have none."""

    def __init__(self, overrides: list[tuple[str, str]], read_files: Callable[[], list[ConfigFile]]) -> None:
        """``overrides``: (key, text that was typed), in order. ``read_files``: those merged, first to last."""
        self._overrides, self._read_files = overrides, read_files
        self._files: list[ConfigFile] | None = None

    def of(self, key: str) -> str:
        """The override or ``file:line`` that gave ``key`` its value; "" for the schema's own default."""
        plain_key = key.partition("[")[0]
        setting = [(name, text) for name, text in reversed(self._overrides) if is_under(plain_key, (name,))]
        # a key that was typed wins over any option, whichever came first; of nested ones the last does
        for name, text in setting:
            if name == plain_key or "{" in text:
                return f"override {text!r}"
        option = next((text for name, text in setting if name != plain_key), "")
        if self._files is None:
            self._files = self._read_files()
        for file in reversed(self._files):  # the last one that sets the key wins
            inside = file.holds(plain_key)
            if inside is not None and not (option and file.is_ours):
                return file.location(inside)
        return f"override {option!r}" if option else ""
