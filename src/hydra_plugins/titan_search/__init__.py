"""``hydra/sweeper=titan_search``: the planner chooses the jobs of a sweep, among all that is not typed.

Thin on purpose: Hydra takes sweepers from this namespace alone, and imports it whenever any Hydra program starts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class TitanSearchOptions:
    """jobs: how many of the configurations found are run, the fastest first. params: as of Hydra's own sweeper."""

    _target_: str = "hydra_plugins.titan_search.TitanSearch"
    jobs: int = 1
    params: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="titan_search", node=TitanSearchOptions, provider="titanyaml")


class TitanSearch(Sweeper):
    """Find the fastest configurations that fit, then hand the first of them to the launcher."""

    def __init__(self, jobs: int, params: dict[str, Any]) -> None:
        self.jobs, self.params = jobs, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra."""
        self.composed, self.config_loader = config, hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """arguments: the overrides as typed, several values among them."""
        # not above: other Hydra programs import this file, and need neither the planner nor what it imports
        from titanyaml.config.hydra.compose_hook import Loader
        from titanyaml.runner import planned_sweep

        assert self.launcher is not None, "Hydra calls setup first"
        hydra = self.composed.hydra
        overrides = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        loader, folder = Loader(self.config_loader, hydra.job.config_name), Path(hydra.sweep.dir)
        return planned_sweep.run(overrides, loader, self.launcher, folder=folder, jobs=self.jobs)
