"""A whole run with our kernels against the same run without: set-up, loop, validation, checkpoint, report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titanyaml.config import dump
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.kernels import adamw, cross_entropy, kernel_choice
from titanyaml.optim.adamw_backends import TritonAdamW
from titanyaml.rundir import RunDir
from titanyaml.runner import run_report
from titanyaml.runner.train import Trainer, build_trainer

SIZES = (
    "model.vocab_size=258",
    "model.dim=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=32",
    "model.max_seq_len=16",
    "train.local_batch=2",
    "tokenizer=bytes",
    "tracker=none",
    "data=synthetic",
    "train.steps=3",
    "train.compute_dtype=bfloat16",
    "optim.lr=1e-2",
    "validation.batches=1",
    "validation.interval=0",
    "compile=none",
    "hardware=cpu",
    "parallel=single",
)


def run(path: Path, compose, device: torch.device, *overrides: str) -> tuple[Trainer, list[dict], dict]:
    """The trainer, its metrics and its event of the kernels."""
    config = dump.to_dataclass(compose(*SIZES, f"run.dir={path}", *overrides))
    run_dir = RunDir(path)
    run_dir.path.mkdir()
    trainer = build_trainer(config, run_dir, Env(0, 1, 0, device, "gloo"))
    try:
        trainer.fit()
    finally:
        trainer.close()
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    [event] = [event for event in events if event["kind"] == "kernels"]
    return trainer, run_dir.metrics(), event


@pytest.mark.parametrize("batch", ["train.global_batch=2", "train.global_batch=4"], ids=["one", "accumulated"])
def test_trains_alike(device, monkeypatch, compose, tmp_path: Path, batch: str) -> None:
    """Gradients of one microbatch are read in bfloat16, those of two are summed in float32."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 128)
    monkeypatch.setattr(adamw, "BLOCK", 4096)
    monkeypatch.setattr(kernel_choice, "_missing", lambda device, dtype: "")  # the interpreter stands for a GPU
    fused, metrics, event = run(tmp_path / "fused", compose, device, batch)
    plain, expected, plain_event = run(
        tmp_path / "torch", compose, device, batch, "kernels=torch", "optim.implementation=loop"
    )
    assert isinstance(fused.optimizer, TritonAdamW) and fused.optimizer.accumulates is (batch[-1] == "4")
    assert event["why"] == "kernels=auto" and event["cross_entropy"] == "fused, 4096 tokens a chunk"
    assert event["adamw"].startswith("fused") and plain_event["adamw"] == "torch, loop"
    assert plain_event["cross_entropy"] == "torch, 1024 tokens a chunk"
    for ours, plain_metrics in zip(metrics, expected, strict=True):
        assert ours["loss"] == pytest.approx(plain_metrics["loss"], rel=2e-4)
        assert ours["grad_norm"] == pytest.approx(plain_metrics["grad_norm"], rel=1e-2)
    assert metrics[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=2e-4)
    for name in fused.optimizer.names:
        ours, plain_metrics = fused.optimizer.master(name), plain.optimizer.master(name)
        # Adam's first steps of 1e-2 are half of the initial weights: what was not updated would be far off
        assert (ours - plain_metrics).norm() < 0.02 * plain_metrics.norm()


def test_the_loss_of_tp_ranks_is_named(compose) -> None:
    config = dump.to_dataclass(compose("parallel=tp2"))
    for fused, summary in ((True, "fused, 4096 tokens a chunk"), (False, "torch, 1024 tokens a chunk")):
        ctx = SimpleNamespace(kernels=kernel_choice.KernelChoice(fused, "for a test"), dims=ParallelDims(tp=2))
        records = run_report.describe_kernels(config, ctx, SimpleNamespace(describe=lambda: "torch"))
        assert records["cross_entropy"] == f"{summary}, normalised over 2 tp ranks"
