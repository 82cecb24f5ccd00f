"""A run on two pipeline ranks, from the configuration to the metrics: it trains as one process does, and resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.helpers import bits, checkpoints, metrics, records, tensors
from tests.e2e.test_parity import FLOAT64, SHORT, begin, configure  # noqa: F401 - a fixture
from tests.ranks import run_ranks
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.rundir import RunDir
from titanyaml.runner.train import train

#: A group of which the second rank has no parameter, and a batch that only a pipeline takes to be the default.
COMMON = (
    *SHORT,
    *FLOAT64,
    "train.local_batch=2",
    "schedule=constant",
    "optim.groups=[{pattern: tok_embeddings, lr_scale: 0.5}]",
)


def body(rank: int, config: Config, folder: Path, generation: int) -> float:
    return train(config, RunDir(folder, generation=generation), Env.from_environ("cpu"))["validation_loss"]


def train_on(ranks: int, config: Config, folder: Path) -> RunDir:
    run = begin(config, folder)
    losses = run_ranks(body, ranks, config, run.path, run.generation)
    run.release()
    assert losses == [records(run.path)[-1]["validation_loss"]] * ranks
    return run


def test_two_pipeline_ranks_train_as_one_and_resume(configure: Callable[..., Config], tmp_path: Path) -> None:  # noqa: F811
    config_of_one = configure(*COMMON, "parallel=single", "train.global_batch=4")
    config_of_two = configure(*COMMON, "parallel=pp2")
    half = dataclasses.replace(config_of_two, train=dataclasses.replace(config_of_two.train, steps=3))
    expected, straight = train_on(1, config_of_one, tmp_path / "one"), train_on(2, config_of_two, tmp_path / "two")
    train_on(2, half, tmp_path / "again")
    resumed = train_on(2, config_of_two, tmp_path / "again")
    for name in ("loss", "grad_norm", "lr"):
        expected_values = [record[name] for record in records(expected.path)]
        assert [record[name] for record in records(straight.path)] == pytest.approx(expected_values, rel=1e-9, abs=0)
    validated = [records(run.path)[-1]["validation_loss"] for run in (straight, expected)]
    assert validated[0] == pytest.approx(validated[1], rel=1e-9)
    assert metrics(resumed.path) == metrics(straight.path)
    resumed_tensors, straight_tensors, expected_tensors = (
        tensors(checkpoints(run.path)[-1]) for run in (resumed, straight, expected)
    )
    assert bits(resumed_tensors) == bits(straight_tensors)
    assert resumed_tensors.keys() == expected_tensors.keys()
