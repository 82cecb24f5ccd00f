"""Hydra's own composition, made to report all problems at once. The only file that uses private names of Hydra.

``install`` wraps two methods of ``ConfigLoaderImpl``, so that running, ``--cfg`` and every job of a sweep go through
``compose_report``; nothing is written to disk for a configuration that is refused. In a sweep a refused job fails
alone: its problems wait in ``problems_for`` until the task function asks for them and raises them.
"""

import argparse
import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from titanyaml.config.hydra import search_path, store
from titanyaml.config.hydra.composition_report import compose_report
from titanyaml.config.hydra.origins import ConfigFile
from titanyaml.errors import ConfigError, Problem

#: Releases of Hydra that the private names of this file were tried with; setup.cfg bounds it to the same line.
TRIED_HYDRA = ("1.3.8",)
_RELEASE_LINES = tuple(version.rpartition(".")[0] + "." for version in TRIED_HYDRA)
_load_configuration = ConfigLoaderImpl.load_configuration
_load_sweep_config = ConfigLoaderImpl.load_sweep_config
_refused: dict[tuple[str, ...], list[Problem]] = {}
_composing_job = False  # a job of a sweep is composed in RunMode.RUN too

#: ``hydra.sweeper._target_`` of a search.
SEARCH = "hydra_plugins.titan_search.TitanSearch"


def install() -> None:
    """Check everything that Hydra composes in this process from now on; idempotent.

    Not for ``--help``, which must work whatever the configuration is. Shell completion is left alone by itself.
    """
    assert hydra.__version__.startswith(_RELEASE_LINES), f"tried with hydra-core {TRIED_HYDRA}, not {hydra.__version__}"
    store.register()
    _replace_methods(_checked_load_configuration, _checked_load_sweep_config)


def uninstall() -> None:
    """Give Hydra its own methods back, and forget what was refused."""
    _replace_methods(_load_configuration, _load_sweep_config)
    _refused.clear()


def _replace_methods(load_configuration: Any, load_sweep_config: Any) -> None:
    # the point of this file, and what mypy forbids
    ConfigLoaderImpl.load_configuration = load_configuration  # type: ignore[method-assign]
    ConfigLoaderImpl.load_sweep_config = load_sweep_config  # type: ignore[method-assign]


def flag_parser() -> argparse.ArgumentParser:
    """The parser of Hydra's own flags (``--cfg``, ``-m``, ...)."""
    return get_args_parser()


def problems_for(overrides: Sequence[str]) -> list[Problem] | None:
    """Why the sweep job with these overrides (``HydraConfig.get().overrides.task``) was refused; None: it was not."""
    return _refused.get(_job_key(overrides))


def _job_key(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(overrides))


def _checked_load_configuration(
    self: ConfigLoaderImpl,
    config_name: str | None,
    overrides: list[str],
    run_mode: RunMode,
    from_shell: bool = True,
    validate_sweep_overrides: bool = True,
) -> DictConfig:
    if "COMP_LINE" in os.environ:  # shell completion: half-typed words are no problems
        return _load_configuration(self, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
    report = compose_report(overrides, loader=Loader(self, config_name), multirun=run_mode == RunMode.MULTIRUN)
    # Hydra's first call only reads hydra.mode and swallows every error; problems are raised at the second call
    if report.cfg is None or (report.problems and validate_sweep_overrides):
        raise ConfigError(report.problems)
    if run_mode == RunMode.RUN and validate_sweep_overrides and not _composing_job:
        _refuse_idle_search(report.cfg)
    return report.cfg


def _refuse_idle_search(cfg: DictConfig) -> None:
    """Without -m Hydra runs one job and asks no sweeper."""
    if OmegaConf.select(cfg, "hydra.sweeper._target_") == SEARCH:
        raise ConfigError(
            "titan_search is a sweeper, which nothing asks without -m: one configuration would run as it is typed",
            key="hydra/sweeper",
            hint="-m hydra/sweeper=titan_search",
        )


def _checked_load_sweep_config(
    self: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: list[str]
) -> DictConfig:
    global _composing_job
    job_key = _job_key(sweep_overrides)
    _refused.pop(job_key, None)
    _composing_job = True
    try:
        return _load_sweep_config(self, master_config, sweep_overrides)
    except ConfigError as error:
        _refused[job_key] = error.problems
    finally:
        _composing_job = False
    # the launcher needs a configuration to get as far as the task function, which then fails in the job's own folder
    stand_in = copy.deepcopy(master_config)  # shared by all jobs
    with open_dict(stand_in):
        stand_in.hydra.overrides.task = list(sweep_overrides)
        stand_in.hydra.job.override_dirname = ",".join(job_key)
    OmegaConf.copy_cache(from_config=master_config, to_config=stand_in)  # ${now:...} is the same for all jobs
    return stand_in


class Loader:
    """What the report needs of Hydra: parsing, options, one composition, the files behind it."""

    def __init__(self, impl: ConfigLoader, config_name: str | None) -> None:
        assert isinstance(impl, ConfigLoaderImpl)  # Hydra's only one
        self._impl, self._config_name = impl, config_name
        self._repository: Any = impl.repository  # Hydra gives its repository no interface

    def use_search_path(self, overrides: list[str]) -> None:
        """Follow ``hydra.searchpath`` of the command line and of the primary configuration."""
        _, self._repository = self._impl._parse_overrides_and_create_caching_repo(self._config_name, overrides)

    def parse(self, override: str) -> Override:
        """Raises hydra.errors.OverrideParseException."""
        return OverridesParser.create(config_loader=self._impl).parse_override(override)

    def is_group(self, name: str) -> bool:
        return bool(self._repository.group_exists(name))

    def has_option(self, group: str, option: str) -> bool:
        return bool(self._repository.config_exists(f"{group}/{option}"))

    def options(self, group: str) -> list[str]:
        return cast(list[str], self._repository.get_group_options(group, ObjectType.CONFIG))

    def wrong_ending(self, group: str, option: str) -> str:
        """Path of ``option.yml`` in a folder of the search path, "" if there is none."""
        for source in self._repository.get_sources():
            file = os.path.join(source.path, group, f"{option}.yml")
            if source.scheme() == "file" and os.path.isfile(file):
                return file
        return ""

    def groups(self) -> list[str]:
        return cast(list[str], self._repository.get_group_options("", ObjectType.GROUP))

    def compose(self, overrides: list[str], *, multirun: bool) -> DictConfig:
        """One composition with an untyped schema: values of wrong types land in the tree, to be reported together."""
        with _untyped_schema():
            return _load_configuration(self._impl, self._config_name, overrides, _run_mode(multirun))

    def files(self, overrides: list[str], *, multirun: bool) -> list[ConfigFile]:
        """The user's and our files in the order in which they are merged."""
        files = []
        for item in self._impl.compute_defaults_list(self._config_name, overrides, _run_mode(multirun)).defaults:
            path = item.config_path or ""
            if path == store.SCHEMA_NAME or path == "hydra" or path.startswith("hydra/"):
                continue
            result = self._repository.load_config(path)
            if result is not None:
                files.append(ConfigFile(result.path, path, item.package or "", result.config))
        return files


def _run_mode(multirun: bool) -> RunMode:
    return RunMode.MULTIRUN if multirun else RunMode.RUN


@contextmanager
def _untyped_schema() -> Iterator[None]:
    entry = ConfigStore.instance().repo[f"{store.SCHEMA_NAME}.yaml"]
    typed = entry.node
    # merged into typed nodes, the first value of a wrong type would end the composition
    entry.node = OmegaConf.create(OmegaConf.to_container(typed, resolve=False))
    try:
        yield
    finally:
        entry.node = typed


def main_loader(*, config_dir: str | None = None) -> Loader:
    """A loader like the command line's: our configuration, and a user's folder (``--config-dir``) behind it."""
    store.register()
    hydra.version.setbase("1.3")  # what hydra.main does first
    hydra_path = create_config_search_path(f"pkg://{search_path.CONF_PACKAGE}")
    if config_dir is not None:
        folder = f"file://{os.path.abspath(config_dir)}"
        hydra_path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    return Loader(ConfigLoaderImpl(hydra_path), "config")
