from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from titanyaml.config.hydra import store


def test_smallest_in_yaml() -> None:
    store.register()
    store.register()
    assert OmegaConf.create({"a": 9, "b": "${titan.min:${a},8192}"}).b == 9


def test_slug_is_ten_hex_digits_whatever_the_order() -> None:
    first = store.slug(["optim.lr=1e-3", "model=llama3_debug"])
    assert re.fullmatch(r"[0-9a-f]{10}", first)
    assert first == store.slug(["model=llama3_debug", "optim.lr=1e-3"])
    assert first != store.slug(["model=llama3_debug", "optim.lr=1e-4"])


@pytest.mark.parametrize(
    "extra",
    [
        "sweep.on_failure=stop",
        "launch.nproc=2",
        "launch=external",
        "hydra.sweep.dir=x",
        "hydra/launcher=joblib",
        "+launch.nproc=2",
        "++sweep.on_failure=stop",
        "~launch",
    ],
)
def test_slug_leaves_out_how_the_job_is_started(extra: str) -> None:
    assert store.slug(["optim.lr=1e-3", extra]) == store.slug(["optim.lr=1e-3"])


@pytest.mark.parametrize("extra", ["sweeper=1", "user.launch=2", "launcher=x", "run.name=sweep"])
def test_slug_keeps_what_only_looks_like_it(extra: str) -> None:
    assert store.slug([extra]) != store.slug([])


def test_slug_of_a_configuration_list() -> None:
    """Hydra hands over a ListConfig."""
    store.register()
    cfg = OmegaConf.create({"task": ["b=1", "a=2"], "slug": "${titan.slug:${task}}"})
    assert cfg.slug == store.slug(["a=2", "b=1"])
