"""``compile.cuda_graphs`` on a GPU: the same training, from replayed blocks; what cannot be replayed is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.plugins.small import CPU, build
from titanyaml.config import dump
from titanyaml.distributed import compat_compile
from titanyaml.distributed.env import Env
from titanyaml.errors import PipelineError
from titanyaml.rundir import RunDir
from titanyaml.runner.train import Trainer, build_trainer

COMPILE = {"_target_": "titanyaml.plugins.compile.Compile", "mode": "block"}
SIZES = (
    "model.vocab_size=258",
    "model.dim=256",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=512",
    "model.max_seq_len=128",
    "train.local_batch=2",
    "tokenizer=bytes",
    "tracker=none",
    "data=synthetic",
    "train.steps=8",
    "checkpoint=none",
    "parallel=single",
    "optim.lr=1e-3",
    "hardware=h200",
    "validation.batches=2",
    "validation.interval=4",
    "compile=block",
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def no_budget():
    yield
    compat_compile.set_activation_memory_budget(1.0)


def train(path: Path, compose, *overrides: str) -> tuple[RunDir, Trainer, dict[str, torch.Tensor]]:
    """Eight steps, and the gradients of the last one."""
    torch._dynamo.reset()
    run = RunDir(path)
    run.path.mkdir()
    config = dump.to_dataclass(
        compose(*SIZES, f"run.dir={path}", f"compile.cache_dir={path.parent}/compiled", *overrides)
    )
    trainer = build_trainer(config, run, Env(0, 1, 0, torch.device("cuda", 0), "gloo"))
    update, grads = trainer.optimizer.step, {}

    def keep(lr: float, *, clip: torch.Tensor | None = None) -> None:
        gradients = zip(trainer.optimizer.names, trainer.optimizer.grads(), strict=True)
        grads.update({name: grad.clone() for name, grad in gradients})
        update(lr, clip=clip)

    trainer.optimizer.step = keep
    try:
        trainer.fit()
    finally:
        trainer.close()
    return run, trainer, grads


@on_gpu
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.global_batch=6"],
        ["train.compute_dtype=float32", "train.global_batch=4"],
        ["ac=memory_budget"],
        ["kernels=torch", "compile.loss=true", "compile.optimizer=true"],
    ],
    ids=["one", "accumulated", "float32", "recomputed", "all compiled"],
)
def test_trains_alike(compose, tmp_path: Path, overrides: list[str]) -> None:
    """Losses, validation and weights of eight steps, gradients of the last.

    With float32 weights autograd keeps the graphs' own gradients from one microbatch to the next."""
    before, plain, expected = train(tmp_path / "plain", compose, *overrides)
    run, replayed, grads = train(tmp_path / "graphs", compose, *overrides, "compile.cuda_graphs=true")
    for ours, reference in zip(run.metrics(), before.metrics(), strict=True):
        for name in ("loss", "grad_norm", "validation_loss"):
            if name in reference:
                assert ours[name] == pytest.approx(reference[name], rel=1e-4), (name, ours["step"])
    for name in plain.optimizer.names:
        assert (grads[name] - expected[name]).norm() < 1e-2 * expected[name].norm(), name
        ours, reference = replayed.optimizer.master(name), plain.optimizer.master(name)
        assert (ours - reference).norm() < 1e-3 * reference.norm(), name
    assert compat_compile.cuda_graphs_recorded(torch.device("cuda", 0)) >= 2 * 3, "a forward and a backward a block"
    [record] = [entry for entry in json.loads((run.path / "pipeline.json").read_text()) if entry["node"] == "compile"]
    assert "replayed as CUDA graphs" in record["summary"]


@on_gpu
def test_recomputed_attention_is_replayed_or_told(compose, tmp_path: Path) -> None:
    """A recomputed block keeps the state of random numbers of its attention, which Inductor may hold on the host."""
    try:
        run, _, _ = train(tmp_path / "graphs", compose, "ac=full", "compile.cuda_graphs=true")
    except PipelineError as error:
        assert "compile.cuda_graphs: asked for, but Inductor refuses" in str(error)
        return
    before, _, _ = train(tmp_path / "plain", compose, "ac=full")
    assert [entry["loss"] for entry in run.metrics()] == pytest.approx(
        [entry["loss"] for entry in before.metrics()], rel=1e-4
    )


def test_what_was_not_recorded_is_an_error() -> None:
    """On a CPU Inductor makes no CUDA graph: the third step says so."""
    built = build({"compile": {**COMPILE, "backend": "aot_eager"}})
    [(_, transform)] = built.resolved.steps
    transform.cuda_graphs = True
    transform.after_step(built.model)
    transform.after_step(built.model)
    with pytest.raises(PipelineError, match="asked for, but nothing was recorded in the first steps"):
        transform.after_step(built.model)
    transform.after_step(built.model)  # told once
    assert transform.device == CPU
