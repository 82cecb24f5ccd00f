"""Two ranks train as one process does: the same initial weights to the bit, the same losses and gradient norms."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor

from tests.e2e.helpers import SIZES, bits, checkpoints, metrics, records, tensors
from tests.ranks import run_ranks
from titanyaml.config import dump
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.rundir import RunDir
from titanyaml.runner import setup
from titanyaml.runner.train import train

FLOAT64 = tuple(f"train.{part}_dtype=float64" for part in ("compute", "param", "reduce"))
SHORT = (*SIZES, "train.steps=5", "optim.lr=1e-3", "validation.batches=2", "validation.interval=0")


@pytest.fixture
def configure(compose: Callable[..., DictConfig], corpus: Path, cache: Path) -> Callable[..., Config]:
    """The checked-in configuration with overrides, as ranks read it."""

    def configured(*overrides: str) -> Config:
        text = ("data=files", f"data.paths=[{corpus}]", f"data.cache_dir={cache}", "data.validation_fraction=0.1")
        return dump.to_dataclass(compose(*text, *overrides))

    return configured


def begin(config: Config, folder: Path) -> RunDir:
    """A claimed run directory, as the launcher leaves it to the ranks."""
    run = RunDir(folder)
    run.claim()
    return run


def body(rank: int, config: Config, folder: Path, generation: int) -> tuple[str, float]:
    """Train on this rank; the hash of the initial weights, and the validation loss that this rank knows."""
    env, digest = Env.from_environ("cpu"), hashlib.sha256()
    for name, weight in sorted(setup.build_model(config, env).weights().items()):
        full_weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        digest.update(f"{name} {full_weight.dtype} {tuple(full_weight.shape)}".encode())
        digest.update(full_weight.contiguous().view(torch.uint8).numpy().tobytes())
    result = train(config, RunDir(folder, generation=generation), env)
    return digest.hexdigest(), result["validation_loss"]


def train_on(ranks: int, config: Config, folder: Path) -> tuple[str, RunDir]:
    """Train on so many ranks: (hash of the initial weights, the run)."""
    run = begin(config, folder)
    answers = run_ranks(body, ranks, config, run.path, run.generation)
    run.release()
    assert len(set(answers)) == 1, "ranks disagree"
    assert answers[0][1] == records(run.path)[-1]["validation_loss"]
    return answers[0][0], run


CASES = {
    "fsdp2 float64": ("fsdp2", 2, FLOAT64, 1e-9),
    "fsdp2 float32": ("fsdp2", 1, (), 1e-4),
    "ddp2 float64": ("ddp2", 1, FLOAT64, 1e-9),
    "ddp2 float32": ("ddp2", 2, (), 1e-4),
    "fsdp2 tied": ("fsdp2", 1, (*FLOAT64, "model.tie_embeddings=true"), 1e-9),
    "fsdp2 documents": ("fsdp2", 2, (*FLOAT64, "model.document_mask=true", "ac=full"), 1e-9),
    "tp2 documents": ("tp2", 2, (*FLOAT64, "model.document_mask=true"), 1e-9),
    "cp2 documents": ("cp2", 1, (*FLOAT64, "model.document_mask=true"), 1e-9),
    "cp2 ring": ("cp2", 2, (*FLOAT64, "parallel.cp_method=ring"), 1e-9),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(configure: Callable[..., Config], tmp_path: Path, case: str) -> None:
    mesh, accumulation, extra, tolerance = CASES[case]
    common = (*SHORT, *extra, f"train.global_batch={4 * accumulation}")
    config_of_one = configure(*common, "parallel=single", "train.local_batch=4")
    local_batch = 2 if "dp" in mesh else 4  # tp and cp peers share the batch
    config_of_two = configure(*common, f"parallel={mesh}", f"train.local_batch={local_batch}")
    weights_one, run_one = train_on(1, config_of_one, tmp_path / "one")
    weights_two, run_two = train_on(2, config_of_two, tmp_path / "two")
    assert weights_one == weights_two
    expected, actual = records(run_one.path), records(run_two.path)
    assert [record["step"] for record in actual] == [record["step"] for record in expected] == [1, 2, 3, 4, 5]
    for name in ("loss", "grad_norm", "lr"):
        assert [r[name] for r in actual] == pytest.approx([r[name] for r in expected], rel=tolerance, abs=0)
    assert actual[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=tolerance)
    assert expected[0]["loss"] > expected[-1]["loss"]
    weights, reference = tensors(checkpoints(run_two.path)[-1]), tensors(checkpoints(run_one.path)[-1])
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(weights[name], tensor, rtol=100 * tolerance, atol=100 * tolerance, msg=name)


def resumed(configure: Callable[..., Config], folder: Path, ranks: int, overrides: tuple[str, ...]) -> RunDir:
    """Four steps, then on to eight in the same folder."""
    config = configure(*SHORT, *overrides, "schedule=constant", "train.steps=8")
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    train_on(ranks, half, folder)
    return train_on(ranks, config, folder)[1]


@pytest.mark.parametrize(
    "ranks, overrides",
    [
        (1, ("parallel=single", "train.compute_dtype=bfloat16")),
        (1, ("parallel=single", "train.compute_dtype=bfloat16", "train.global_batch=8")),
        (2, ("parallel=fsdp2", "train.compute_dtype=bfloat16")),
        (2, ("parallel=ddp2",)),
    ],
    ids=["bf16", "bf16 accumulated", "bf16 fsdp2", "ddp2"],
)
def test_resuming_is_exact_in_every_precision(
    configure: Callable[..., Config], tmp_path: Path, ranks: int, overrides: tuple[str, ...]
) -> None:
    config = configure(*SHORT, *overrides, "schedule=constant", "train.steps=8")
    _, straight = train_on(ranks, config, tmp_path / "straight")
    resumed_run = resumed(configure, tmp_path / "resumed", ranks, overrides)
    assert metrics(resumed_run.path) == metrics(straight.path) and len(metrics(straight.path)) == 8
    actual, expected = (tensors(checkpoints(run.path)[-1]) for run in (resumed_run, straight))
    assert bits(actual) == bits(expected)
    floating = {name: t.dtype for name, t in expected.items() if t.is_floating_point()}
    assert set(floating.values()) == {torch.float32}  # the masters and their moments, whatever computes
    losses = [record["loss"] for record in records(straight.path)]
    assert losses[-1] < losses[0]
    if "train.compute_dtype=bfloat16" in overrides:
        weight = expected["model/layers.0.attention.wq.weight"]
        assert not torch.equal(weight, weight.bfloat16().float()), "the master is no finer than what computes"
