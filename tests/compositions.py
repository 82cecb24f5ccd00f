"""Compose once per choice of groups: values are set on a copy, by Hydra's own function.

Hydra takes 0.13 s for a composition, nearly all of it for reading and merging the groups' files. Tests of rules compose
hundreds of trees that differ in a few values.
"""

from __future__ import annotations

import copy
import functools

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from titanyaml.config.hydra import store


def composed(*overrides: str) -> DictConfig:
    """The typed tree that ``hydra.compose`` gives for these overrides, unchecked, to be changed at will."""
    groups = tuple(override for override in overrides if not _sets_a_value(override))
    # what the group plugin offers depends on the packages that a test installs
    compose_groups = _composed_groups.__wrapped__ if any("plugin" in group for group in groups) else _composed_groups
    cfg = copy.deepcopy(compose_groups(groups))
    values = [override for override in overrides if _sets_a_value(override)]
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), cfg)
    return cfg


def _sets_a_value(override: str) -> bool:
    """A dotted key is never a group; hydra.* is not in the tree that ``compose`` returns."""
    key = override.partition("=")[0].lstrip("+~")
    return "." in key and "@" not in key and "/" not in key and not key.startswith("hydra.")


@functools.cache
def _composed_groups(overrides: tuple[str, ...]) -> DictConfig:
    store.register()
    with initialize_config_module("titanyaml.conf", version_base="1.3"):
        return compose("config", list(overrides))
