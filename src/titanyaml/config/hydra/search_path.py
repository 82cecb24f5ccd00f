"""Sources of configuration besides ``conf/``: mesh names, ``experiments/``, third-party packages."""

import os
import re
from importlib import resources
from importlib.metadata import entry_points
from itertools import product
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from titanyaml.config.degrees import PARTS, parse_mesh_name

CONF_PACKAGE = "titanyaml.conf"
EXPERIMENTS_PACKAGE = "titanyaml.experiments"
ENTRY_POINT_GROUP = "titanyaml.conf"

#: What ``parallel=<tab>``, ``--help`` and ``parallel=glob(*)`` list: names that compose and run.
_COMMON_MESHES = ("cp2", "ddp2", "fsdp2", "fsdp2_tp2", "fsdp4", "fsdp8", "hsdp2x2", "hsdp2x4", "tp2")
_COMPLETED_SIZES = (2, 4, 8, 16, 32, 64)  # for completion alone: any number composes


class MeshSource(ConfigSource):
    """Every mesh name is an option of the group ``parallel``, without a file."""

    @staticmethod
    def scheme() -> str:
        return "mesh"

    def load_config(self, config_path: str) -> ConfigResult:
        degrees = _mesh_of(config_path)
        if degrees is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        return _result(self, OmegaConf.create(degrees), None)

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", "parallel")

    def is_config(self, config_path: str) -> bool:
        return _mesh_of(config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path.strip("/") == "":
            return [] if results_filter == ObjectType.CONFIG else ["parallel"]
        if results_filter == ObjectType.GROUP:
            return []
        # Hydra's completion passes no prefix to a source; the shell's line has it
        prefix = re.search(r"(?:^|\s)parallel=(\S+)$", os.environ.get("COMP_LINE", ""))
        return complete_mesh_name(prefix[1]) if prefix else sorted(_COMMON_MESHES)


def _result(source: ConfigSource, config: Any, package: str | None) -> ConfigResult:
    return ConfigResult(source.provider, source.full_path(), config, header={"package": package})


def _mesh_of(config_path: str) -> dict[str, int] | None:
    group, _, name = config_path.rpartition("/")
    return parse_mesh_name(name.removesuffix(".yaml")) if group == "parallel" else None


def complete_mesh_name(prefix: str) -> list[str]:
    """Mesh names that begin with ``prefix`` and have one part more (shell completion)."""
    complete_parts = prefix.rpartition("_")[0]
    head = f"{complete_parts}_" if complete_parts else ""
    names = [
        head + part + "x".join(map(str, sizes))
        for part, axes in PARTS.items()
        for sizes in product(_COMPLETED_SIZES, repeat=len(axes))
    ]
    # a name whose last part repeats an axis is no mesh
    return sorted(name for name in names if name.startswith(prefix) and parse_mesh_name(name))


class ExperimentSource(ConfigSource):
    """Serves the folder ``experiments/`` as the group ``experiment``, in a checkout and in a wheel alike."""

    @staticmethod
    def scheme() -> str:
        return "experiments"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        with file.open(encoding="utf-8") as stream:  # not from its text: OmegaConf names the file in YAML errors
            config = OmegaConf.load(stream)
        header = re.match(r"\s*#\s*@package\s+(\S+)", file.read_text(encoding="utf-8"))
        return _result(self, config, header and header[1])

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", "experiment")

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path) is not None

    def available(self) -> bool:
        return resources.files(self.path).joinpath("__init__.py").is_file()  # not if a wheel was built without it

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path.strip("/") == "":
            return [] if results_filter == ObjectType.CONFIG else ["experiment"]
        if results_filter == ObjectType.GROUP:
            return []  # with sub-groups completion would stop offering "experiment="
        return sorted(_yaml_names(resources.files(self.path), ""))

    def _file(self, config_path: str) -> Any | None:
        group, _, name = config_path.partition("/")
        if group != "experiment" or not name:
            return None
        file = resources.files(self.path).joinpath(name.removesuffix(".yaml") + ".yaml")
        return file if file.is_file() else None


def _yaml_names(folder: Any, prefix: str) -> list[str]:
    names = []
    for item in folder.iterdir():
        if item.is_dir():
            names += _yaml_names(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".yaml"):
            names.append(prefix + item.name.removesuffix(".yaml"))
    return names


class TitanSearchPath(SearchPathPlugin):
    """Adds our sources and those of installed packages to Hydra's search path.

    A package joins by one entry point of the group ``titanyaml.conf`` whose value is a Python package with YAML in it.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        main = {item.path for item in search_path.get_path() if item.provider == "main"}
        if f"pkg://{CONF_PACKAGE}" not in main:  # --config-path: the user's folder replaced ours
            search_path.append(provider="titanyaml", path=f"pkg://{CONF_PACKAGE}")
        search_path.append(provider="titanyaml-mesh", path="mesh://parallel")
        search_path.append(provider="titanyaml-experiments", path=f"experiments://{EXPERIMENTS_PACKAGE}")
        # sorted: the order of installation must not decide between two packages' options of one name
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
            search_path.append(provider=point.name, path=f"pkg://{point.value}")
