"""Makes the schema, the resolvers and the search path known to Hydra."""

import hashlib
import re
from collections.abc import Iterable

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from titanyaml.config import schema
from titanyaml.config.hydra import search_path

SCHEMA_NAME = "config_schema"

# Keys that do not change the result of a job must not change the name of its folder: the same command, started in
# another way, must find its own jobs.
_NOT_IN_SLUG = re.compile(r"(\+\+?|~)?(sweep|launch|hydra)([./@=]|$)")


def slug(overrides: Iterable[str]) -> str:
    """Ten hex digits that name a sweep job by its overrides, whatever their order."""
    identity = sorted(override for override in overrides if not _NOT_IN_SLUG.match(override))
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:10]


def register(*sweepers: type[Sweeper]) -> None:
    """Register everything that composing needs, and these sweepers, before Hydra runs; idempotent."""
    # Hydra deep-copies its repository, the store in it, for every option that --help looks up (1.6 s instead of
    # 0.5 s). ``ConfigStore.load`` copies what it hands out, so that one shared store is enough.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]  # deepcopy looks it up
    ConfigStore.instance().store(name=SCHEMA_NAME, node=schema.Config, provider="titanyaml")
    setup_globals()  # Hydra's own resolver ${now:...}
    # not the built-in min itself: OmegaConf reads a resolver's signature, and min has none
    OmegaConf.register_new_resolver("titan.min", lambda *numbers: min(numbers), replace=True)
    OmegaConf.register_new_resolver("titan.slug", slug, replace=True)
    # registered, not left to Hydra's scan of hydra_plugins: they work without an installed package
    plugins: list[type[Plugin]] = [search_path.MeshSource, search_path.ExperimentSource, search_path.TitanSearchPath]
    for plugin in (*plugins, *sweepers):
        Plugins.instance().register(plugin)
