"""Makes the schema, the resolvers and the search path known to Hydra."""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper

from titanyaml.config import schema
from titanyaml.config.hydra import resolvers, search_path

SCHEMA_NAME = "config_schema"


def register(*sweepers: type[Sweeper]) -> None:
    """Register everything that composing needs, and these sweepers, before Hydra runs; idempotent."""
    # Hydra deep-copies its repository, the store in it, for every option that --help looks up (1.6 s instead of
    # 0.5 s). ``ConfigStore.load`` copies what it hands out, so that one shared store is enough.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]  # deepcopy looks it up
    ConfigStore.instance().store(name=SCHEMA_NAME, node=schema.Config, provider="titanyaml")
    setup_globals()  # Hydra's own resolver ${now:...}
    resolvers.register()
    # registered, not left to Hydra's scan of hydra_plugins: they work without an installed package
    plugins: list[type[Plugin]] = [search_path.MeshSource, search_path.ExperimentSource, search_path.TitanSearchPath]
    for plugin in (*plugins, *sweepers):
        Plugins.instance().register(plugin)
