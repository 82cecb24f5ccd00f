"""Jobs and configurations to plan."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from titanyaml.config import schema
from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.hydra import compose_hook, store
from titanyaml.config.hydra.composition_report import compose_report
from titanyaml.planner.model import devices
from titanyaml.planner.model.inputs import TITANYAML, Job, Mesh

REPO = Path(__file__).parents[2]
LLAMA_8B = DecoderShape("8b", 128256, 4096, 32, 32, 8, 128, 14336)


@pytest.fixture(scope="session")
def published() -> ModuleType:
    """benchmarks/planner_rows.py."""
    spec = importlib.util.spec_from_file_location("planner_rows", REPO / "benchmarks" / "planner_rows.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_rows"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def job() -> Callable[..., Job]:
    """``job(mesh=Mesh(dp_shard=8), ac="full")``: 8B on H100s of 500 W unless told otherwise."""

    def made(option: str = "h100_500w", **changes) -> Job:
        hardware, cluster = devices.shipped_device(option)
        mesh = changes.pop("mesh", Mesh(dp_shard=8))
        base = Job(
            LLAMA_8B,
            mesh,
            devices.device(hardware),
            devices.network(cluster, world_size=mesh.world_size),
            TITANYAML,
            seq_len=8192,
            local_batch=2,
            ac="selective_op",
        )
        return dataclasses.replace(base, **changes)

    return made


@pytest.fixture(scope="session")
def configure() -> Callable[..., schema.Config]:
    """``configure("parallel=fsdp2")``: the configuration of runner=plan on H200s with these overrides."""
    store.register()
    loader = compose_hook.main_loader()

    def made(*overrides: str) -> schema.Config:
        report = compose_report(["runner=plan", "hardware=h200", *overrides], loader=loader)
        assert not report.problems
        return report.config()

    return made
