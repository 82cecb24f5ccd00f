"""What may change between the attempts of one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from titanyaml.config import dump
from titanyaml.errors import ConfigError
from titanyaml.launch import resume
from titanyaml.rundir import RunDir, atomic_write

Compose = Callable[..., DictConfig]
BEGUN = ("train.steps=10", "optim.lr=1e-3", "parallel=fsdp2")


@pytest.fixture
def begun(compose: Compose, tmp_path: Path) -> RunDir:
    """A run of two ranks with one sequence each."""
    run = RunDir(tmp_path)
    atomic_write(tmp_path / "config.yaml", dump.to_yaml(compose(*BEGUN)))
    run.write_status(state="failed", global_batch=2)
    return run


def changes(compose: Compose, run: RunDir, *overrides: str, global_batch: int = 2) -> set[str]:
    cfg = compose(*BEGUN, *overrides)
    return set(resume.check_changes(dump.to_dataclass(cfg), dump.to_yaml(cfg), run, global_batch=global_batch))


def test_how_far_how_often_and_where_may_change(compose: Compose, begun: RunDir) -> None:
    free = [
        "train.steps=20",
        "train.log_every=5",
        "checkpoint.interval=3",
        "validation.interval=7",
        "ac=full",
        "launch.nproc=2",
        "tracker=none",
    ]
    keys = changes(compose, begun, *free)
    assert {"train.steps", "train.log_every", "checkpoint.interval", "ac.mode", "pipeline.plugins.ac.mode"} <= keys


def test_an_argument_of_a_plugin_follows_the_key_that_it_repeats(compose: Compose, begun: RunDir) -> None:
    keys = changes(compose, begun, "compile.cache_dir=/x", "optim.master=split")
    assert {"pipeline.plugins.async_tp.cache_dir", "pipeline.plugins.fsdp.master"} <= keys
    with pytest.raises(ConfigError) as refused:
        changes(compose, begun, "parallel.cp_method=ring")
    assert [problem.key for problem in refused.value.problems] == ["parallel.cp_method"], "told once"
    assert changes(compose, begun, "pipeline.plugins.fsdp.reuse_memory=true")
    with pytest.raises(ConfigError, match="pipeline.plugins.cp.method"):
        changes(compose, begun, "pipeline.plugins.cp.method=ring")


@pytest.mark.parametrize("override", ["optim.lr=1", "run.seed=1", "model.dim=64", "run.name=other"])
def test_mathematics_may_not(compose: Compose, begun: RunDir, override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changes(compose, begun, override, "train.steps=20")
    key = override.partition("=")[0]
    assert [problem.key for problem in refused.value.problems if problem.key == key] == [key]
    assert "train.steps" not in [problem.key for problem in refused.value.problems]
    assert f"checkpoint.accept_changes=[{key}" in str(refused.value)


def test_a_position_in_the_data_counts_sequences_of_one_length(compose: Compose, begun: RunDir) -> None:
    for accepted in ("", "checkpoint.accept_changes=[train.seq_len]"):
        with pytest.raises(ConfigError, match="train.seq_len: is 8") as refused:
            changes(compose, begun, "train.seq_len=8", *filter(None, [accepted]))
        assert "accept_changes" not in refused.value.problems[0].hint


def test_what_a_checkpoint_brings_is_not_typed(compose: Compose) -> None:
    config = dump.to_dataclass(compose("runner=eval", "runner.checkpoint=outputs/a"))
    with pytest.raises(ConfigError) as refused:
        resume.refuse_checkpoint_keys(config, ["model.dim=64", "tokenizer=bytes", "data=files"])
    assert [(p.key, p.hint) for p in refused.value.problems] == [
        ("model.dim", "leave out model.dim=64"),
        ("tokenizer", "leave out tokenizer=bytes"),
    ]
    resume.refuse_checkpoint_keys(config, ["data=files"])


def test_unless_it_is_accepted_by_name(compose: Compose, begun: RunDir) -> None:
    assert "optim.lr" in changes(compose, begun, "optim.lr=1", "checkpoint.accept_changes=[optim.lr]")
    assert "optim.lr" in changes(compose, begun, "optim.lr=1", "checkpoint.accept_changes=[optim]")
    with pytest.raises(ConfigError, match="optim.lr"):
        changes(compose, begun, "optim.lr=1", "checkpoint.accept_changes=[opt]")


def test_the_mesh_may_change_while_a_step_sees_equally_many_sequences(compose: Compose, begun: RunDir) -> None:
    assert "parallel.dp_shard" in changes(compose, begun, "parallel.dp_shard=1", "train.local_batch=2")
    with pytest.raises(ConfigError, match="train.global_batch: a step would see 4 sequences") as refused:
        changes(compose, begun, "parallel.dp_shard=4", global_batch=4)
    assert "train.global_batch=2 (on any mesh)" in str(refused.value)
    accepted = "checkpoint.accept_changes=[train.global_batch]"
    assert "parallel.dp_shard" in changes(compose, begun, "parallel.dp_shard=4", accepted, global_batch=4)


def test_a_new_folder_has_nothing_to_differ_from(compose: Compose, tmp_path: Path) -> None:
    assert changes(compose, RunDir(tmp_path / "new"), global_batch=1) == set()


def test_finished_means_done_and_not_extended(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_status(state="done", step=10)
    assert resume.is_finished(run, {}, steps=10)
    assert resume.is_finished(run, {"train.steps": (10, 5)}, steps=5)
    assert not resume.is_finished(run, {"train.steps": (10, 20)}, steps=20)
    run.write_status(state="preempted")
    assert not resume.is_finished(run, {}, steps=10)


def test_checkpoints_without_their_configuration_are_not_taken_over(compose: Compose, begun: RunDir) -> None:
    (begun.path / "config.yaml").unlink()
    assert changes(compose, begun) == set()
    (begun.path / "checkpoints" / "step-00000004").mkdir(parents=True)
    with pytest.raises(ConfigError, match="checkpoints but no config.yaml"):
        changes(compose, begun)
    assert changes(compose, begun, "checkpoint.resume=none") == set()
