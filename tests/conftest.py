"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from tests.compositions import composed
from titanyaml import machine
from titanyaml.config.hydra import store

if not machine.gpus():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: our kernels then run on a CPU


def pytest_collection_finish() -> None:
    # collect garbage rarely: most objects were made by imports, and passes over them take an eighth of the time
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True)
def restore_hydra_singletons() -> Iterator[None]:
    """Keep a test from seeing the configuration that another one left in Hydra's singletons."""
    config = HydraConfig.instance().cfg
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = config


@pytest.fixture
def compose() -> Callable[..., DictConfig]:
    """``compose("model=llama3_8b", "optim.lr=1e-3")``: the composed tree as Hydra gives it, unchecked."""

    def compose_tree(*overrides: str, return_hydra_config: bool = False) -> DictConfig:
        if not return_hydra_config:
            return composed(*overrides)
        store.register()
        with initialize_config_module("titanyaml.conf", version_base="1.3"):
            return hydra_compose("config", list(overrides), return_hydra_config=True)

    return compose_tree
