"""``compile.loss`` and ``compile.optimizer`` reach what they name, and leave the training as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titanyaml.config import dump
from titanyaml.distributed.env import Env
from titanyaml.rundir import RunDir
from titanyaml.runner.train import build_trainer

SIZES = (
    "model.vocab_size=258",
    "model.dim=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=32",
    "model.max_seq_len=16",
    "train.local_batch=2",
    "tokenizer=bytes",
    "tracker=none",
    "data=synthetic",
    "train.steps=3",
    "validation=none",
    "checkpoint=none",
    "parallel=single",
    "optim.lr=1e-2",
    "train.global_batch=4",
    "train.max_norm=0.1",
    "loss.chunk_tokens=16",
    "compile.backend=aot_eager",
)


def test_loss_and_optimizer_are_compiled(compose, tmp_path: Path) -> None:
    losses = {}
    for name, overrides in (
        ("plain", ["compile=none", "compile.backend=inductor"]),
        ("compiled", ["compile.loss=true", "compile.optimizer=true"]),
    ):
        torch._dynamo.reset()
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        config = dump.to_dataclass(compose(*SIZES, f"run.dir={run.path}", *overrides))
        trainer = build_trainer(config, run, Env(0, 1, 0, torch.device("cpu"), "gloo"))
        try:
            trainer.fit()
        finally:
            trainer.close()
        losses[name] = [(record["loss"], record["grad_norm"]) for record in run.metrics()]
    for compiled, plain in zip(losses["compiled"], losses["plain"], strict=True):
        assert compiled == pytest.approx(plain, rel=1e-5)
    [record] = [entry for entry in json.loads((run.path / "pipeline.json").read_text()) if entry["node"] == "compile"]
    assert record["verified"]["summary"] == (
        "2 graphs compiled, 0 graph breaks; 1 of them for compile.loss; 1 of them for compile.optimizer"
    )
    [event] = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    startup = run.status()["startup_s"]
    assert list(startup) == ["total", "import", "data", "build", "materialise", "other", "first_step"]
    assert startup["total"] == pytest.approx(sum(startup.values()) / 2) and min(startup.values()) > 0
    assert event["cross_entropy"] == "compiled, 16 tokens a chunk" and event["adamw"] == "compiled"
