"""``optim.master=split`` in whole runs: resumed to the bit, and its checkpoints are those of float32 masters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.plugins.parity import whole
from tests.ranks import run_ranks
from titanyaml.config import dump
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.errors import ConfigError
from titanyaml.kernels.master_weights import is_split
from titanyaml.rundir import RunDir
from titanyaml.runner import setup
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
    "train.compute_dtype=bfloat16",
    "optim.lr=1e-2",
    "schedule=constant",
    "validation.batches=0",
    "compile=none",
    "hardware=cpu",
    "parallel=single",
    "checkpoint.interval=0",
)
ALONE = Env(0, 1, 0, torch.device("cpu"), "gloo")


def configured(path: Path, compose, master: str, steps: int, *overrides: str) -> Config:
    return dump.to_dataclass(
        compose(*SIZES, f"run.dir={path}", f"optim.master={master}", f"train.steps={steps}", *overrides)
    )


def fit(config: Config, env: Env = ALONE) -> Trainer:
    run = RunDir(Path(config.run.dir))
    run.path.mkdir(exist_ok=True)
    trainer = build_trainer(config, run, env)
    try:
        trainer.fit()
    finally:
        trainer.close()
    return trainer


def trained(path: Path, compose, master: str, steps: int, *overrides: str) -> Trainer:
    return fit(configured(path, compose, master, steps, *overrides))


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Stored weights, full-precision ones and moments, as whole tensors."""
    optimizer = trainer.optimizer
    moments = {f"{n}.{kind}": t for n, s in optimizer.state_tensors().items() for kind, t in s.items()}
    named = dict(trainer.built.model.named_parameters()) | {f"{n}.": t for n, t in optimizer.weights().items()}
    return {name: whole(tensor) for name, tensor in (named | moments).items()}


def differing_names(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of what differs in a bit."""
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def test_resumes_to_the_bit_and_goes_through_a_run_with_float32_masters(compose, tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", compose, "split", 4)
    assert all(map(is_split, straight.built.masters.values())) and len(straight.built.masters) == 12
    half = trained(tmp_path / "half", compose, "split", 2)
    resumed = trained(tmp_path / "half", compose, "split", 4)
    assert not differing_names(state(resumed), state(straight))
    # no step is left: what is read is what is written again
    read = f"checkpoint.resume={tmp_path / 'half/checkpoints'}/step-00000004", "checkpoint.keep=9"
    float32_run = trained(tmp_path / "wide", compose, "float32", 4, *read)
    assert not any(map(is_split, float32_run.built.masters.values()))
    assert not [name for name in differing_names(state(float32_run), state(straight)) if name.endswith(".")]
    float32_run.checkpointer._last_saved_step = None
    float32_run._save()
    split_again = trained(tmp_path / "back", compose, "split", 4, f"checkpoint.resume={tmp_path / 'wide'}")
    assert not differing_names(state(split_again), state(straight))
    assert differing_names(state(half), state(straight))


def on_ranks(rank: int, *configs: Config) -> list[dict[str, Tensor]]:
    """The state of one run after the other."""
    trainers = [fit(config, Env.from_environ("cpu")) for config in configs]
    assert all(map(is_split, trainers[0].built.masters.values()))
    return [state(trainer) for trainer in trainers]


def test_shards_resume_to_the_bit_and_change_places_with_float32_masters(compose, tmp_path: Path) -> None:
    """259 rows and 2 ranks: uneven shards."""

    def on_two_ranks(name: str, steps: int, *overrides: str) -> Config:
        return configured(
            tmp_path / name,
            compose,
            "split",
            steps,
            "parallel=fsdp2",
            "train.local_batch=1",
            "model.vocab_size=259",
            *overrides,
        )

    several = "train.global_batch=4"  # two microbatches
    for ranks in run_ranks(
        on_ranks,
        2,
        on_two_ranks("straight", 4, several),
        on_two_ranks("half", 2, several),
        on_two_ranks("half", 4, several),
    ):
        straight, half, resumed = ranks
        assert not differing_names(resumed, straight) and differing_names(half, straight)
    # no step is left: what is read is what is written again
    float32_run = trained(
        tmp_path / "wide",
        compose,
        "float32",
        4,
        "model.vocab_size=259",
        several,
        "checkpoint.keep=9",
        f"checkpoint.resume={tmp_path / 'straight'}",
    )
    assert not any(map(is_split, float32_run.built.masters.values()))
    assert not [name for name in differing_names(state(float32_run), straight) if name.endswith(".")]
    float32_run.checkpointer._last_saved_step = None
    float32_run._save()
    for [split_again] in run_ranks(
        on_ranks, 2, on_two_ranks("back", 4, several, f"checkpoint.resume={tmp_path / 'wide'}")
    ):
        assert not differing_names(split_again, straight)


def test_evaluation_reads_it(compose, tmp_path: Path) -> None:
    weights = trained(tmp_path / "run", compose, "split", 2).optimizer.weights()
    config = dump.to_dataclass(compose(*SIZES, f"run.dir={tmp_path / 'eval'}", "optim.master=split", "run.seed=1"))
    built = setup.build_model(config, ALONE)
    target = built.weights()
    for name, tensor in target.items():
        tensor.copy_(weights[name])
    built.load(target)
    assert not differing_names(built.weights(), weights)


def test_nothing_to_split_is_an_error(compose, tmp_path: Path) -> None:
    config = dump.to_dataclass(compose(*SIZES, f"run.dir={tmp_path}", "optim.master=split", "train.compute_dtype=auto"))
    with pytest.raises(ConfigError, match="no parameter is stored in bfloat16"):
        setup.build_model(config, ALONE)
