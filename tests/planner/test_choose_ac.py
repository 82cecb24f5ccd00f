"""``ac=auto``: the fastest recomputation that is planned to fit, said aloud; and one error where none does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titanyaml.config import dump
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env
from titanyaml.errors import ConfigError
from titanyaml.planner.model import from_config, memory
from titanyaml.planner.model.plan import plan_job
from titanyaml.planner.search import choose_ac
from titanyaml.rundir import RunDir
from titanyaml.runner import auto_ac, plan
from titanyaml.runner.train import build_trainer

CPU = Env(0, 1, 0, torch.device("cpu"), "gloo")
#: 3.6 B parameters and 16,384 tokens on one H200, with the memory that was measured for each mode.
RUN = (
    "model=llama3_3b",
    "model.tie_embeddings=false",
    "parallel=single",
    "train.local_batch=4",
    "train.seq_len=4096",
    "ac=auto",
)


def chosen(config) -> choose_ac.AcChoice:
    limit = choose_ac.memory_limit(config, device_gib=config.hardware.memory_gib)
    return choose_ac.choose(config, from_config.job(config), limit)


@pytest.mark.parametrize(
    ("gib", "mode"),
    [(None, "none"), (91, "none"), (84, "memory_budget"), (72, "selective_op"), (58, "selective_op"), (55, "full")],
)
def test_the_less_memory_the_more_is_recomputed(configure, gib, mode) -> None:
    config = configure(*RUN, *([] if gib is None else [f"ac.memory_gib={gib}"]))
    choice = chosen(config)
    assert choice.fits and choice.ac.mode == mode
    assert choice.limit.gib == (pytest.approx((139.8 - 1.5) * 0.95) if gib is None else gib)
    faster = [option for option in choice.options if option.step_s < choice.plan.step.seconds * 0.98]
    assert not any(option.fits for option in faster), "nothing faster fits"
    assert choice.plan.memory.total / memory.GIB <= choice.limit.gib
    concrete = choose_ac.concrete(config, choice)
    assert concrete.ac.mode == concrete.pipeline.plugins["ac"]["mode"] == mode
    assert config.ac.mode == config.pipeline.plugins["ac"]["mode"] == "auto", "what was asked stays"
    planned_again = plan_job(from_config.job(concrete))
    assert planned_again.total_gib == choice.plan.total_gib, (
        "the plan of the concrete configuration is the one that was shown"
    )


def test_as_many_products_are_kept_as_fit(configure) -> None:
    choice = chosen(configure(*RUN, "ac.memory_gib=72"))
    assert 0.5 < choice.ac.keep_products < 1
    assert f"ac.keep_products={choice.ac.keep_products:g}, planned 7" in choice.sentence()
    [tight] = [option for option in choice.options if "keep_products" in option.typed and not option.fits]
    assert tight.memory_gib - choice.plan.total_gib == pytest.approx(0.375, rel=0.01), "half a block of 3B is missing"
    assert f"{tight.typed} would need 72." in choice.sentence()


def test_more_kept_products_take_more_memory_and_less_time(configure) -> None:
    job = from_config.job(configure(*RUN, "ac.memory_gib=72", "parallel=fsdp2"))
    plans = [plan_job(replace(job, ac="selective_op", ac_keep=share)) for share in (0.0, 0.25, 0.5, 0.6071, 1.0)]
    assert sorted(plans, key=lambda plan: plan.total_gib) == sorted(plans, key=lambda plan: plan.tps) == plans
    stream = 2 * job.tokens * job.shape.dim * job.shape.num_layers
    units = [plan.memory.parts["activations"] / stream for plan in plans]
    assert units == pytest.approx([2, 4, 6, 6 + 4 * 6 / 28, 10], rel=0.001), "3B: of 14.7 residual streams a block"


def test_only_the_compiler_keeps_a_budget(configure) -> None:
    for typed in ("compile=none", "compile.backend=aot_eager"):
        config = configure(*RUN, "ac.memory_gib=80", typed)
        assert not any("budget" in option.typed for option in chosen(config).options)


@pytest.mark.parametrize(("parallel", "cost"), [("tp2", 1.02), ("single", 1.0), ("fsdp2", 1.0)])
def test_a_budget_that_repeats_attention_takes_its_time(configure, parallel: str, cost: float) -> None:
    options = {option.typed: option for option in chosen(configure(*RUN, f"parallel={parallel}")).options}
    more = options["ac=memory_budget ac.budget=0.8"].step_s / options["ac=none"].step_s
    assert cost < more < cost + 0.02


def test_nothing_fits(configure) -> None:
    typed = [*RUN, "parallel=fsdp8", "compile=block"]
    least = min(option.memory_gib for option in chosen(configure(*typed)).options)
    typed.append(f"ac.memory_gib={least - 1}")
    choice = chosen(configure(*typed))
    assert not choice.fits and choice.ac.mode == "full" and "which does not fit" in choice.sentence()
    with pytest.raises(ConfigError) as error:
        auto_ac.resolve(configure(*typed), CPU)
    [problem] = error.value.problems
    assert problem.key == "ac.mode" and f"even ac=full is planned to need {least:.1f} GiB of" in problem.message
    assert "the largest part is optimizer with 3.4 GiB" in problem.message
    hints = problem.hint.split(" or ")
    assert len(hints) > 1 and all("dp_shard=16" not in hint for hint in hints), "with the devices that are there"
    for hint in hints:
        assert chosen(configure(*typed, *hint.split())).fits, hint


def test_one_device_that_is_too_small_needs_more_of_them(configure) -> None:
    with pytest.raises(ConfigError, match="(?s)largest part is optimizer with 40.3 GiB.*try: optim.name=adamw_8bit or"):
        auto_ac.resolve(configure(*RUN, "ac.memory_gib=50"), CPU)


def test_the_smallest_device_counts_on_all_ranks(configure, monkeypatch) -> None:
    monkeypatch.setattr("titanyaml.machine.gpus", lambda: ["a", "b"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=90 * 2**30))
    monkeypatch.setattr(comm, "gather_objects", lambda local_gib, env: [local_gib, 81.0])
    config = configure(*RUN, "runner=train", "tokenizer=bytes", "data=synthetic", "tracker=none", "hardware=auto")
    monkeypatch.setattr("titanyaml.hardware.detect", lambda device: None)
    env = Env(0, 2, 0, torch.device("cuda"), "gloo")
    resolved, choice = auto_ac.resolve(config, env)
    assert choice.limit.source == "81.0 of the device less 1.5 and 5%" and choice.limit.gib == pytest.approx(
        79.5 * 0.95
    )
    assert resolved.ac.mode == resolved.pipeline.plugins["ac"]["mode"] == "selective_op", (
        "timed as an H200, since unknown"
    )


@pytest.mark.parametrize(
    ("typed", "limit_gib", "why"),
    [("139", (139.8 - 1.5) * 0.95, "139.8 of the device less 1.5 and 5%"), ("120", 120, "ac.memory_gib")],
)
def test_a_typed_limit_leaves_the_device_its_margin(configure, typed: str, limit_gib: float, why: str) -> None:
    config = configure(*RUN, f"ac.memory_gib={typed}")
    resolved, choice = plan._resolve_ac(config)
    assert (choice.limit.gib, choice.limit.source) == (pytest.approx(limit_gib), why)
    assert resolved.hardware.memory_gib == pytest.approx(limit_gib + 1.5), "the plan of it is held to the same"
    assert auto_ac.resolve(replace(config, runner=replace(config.runner, name="check")), CPU)[1].limit.source == why


def train(path: Path, compose, *overrides: str) -> tuple[list[float], RunDir]:
    config = dump.to_dataclass(
        compose(
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
            "train.steps=2",
            "validation=none",
            "checkpoint=none",
            "parallel=single",
            f"run.dir={path}",
            *overrides,
        )
    )
    run = RunDir(path)
    run.path.mkdir()
    (path / "config.yaml").write_text("ac:\n  mode: auto\n")
    trainer = build_trainer(config, run, CPU)
    try:
        trainer.fit()
    finally:
        trainer.close()
    return [record["loss"] for record in run.metrics()], run


def test_a_run_trains_as_with_the_concrete_mode_and_says_both(compose, tmp_path: Path) -> None:
    plain, run = train(tmp_path / "none", compose, "ac=auto", "ac.memory_gib=9")
    least = min(option["memory_gib"] for option in run.status()["ac"]["options"])
    losses, run = train(tmp_path / "auto", compose, "ac=auto", f"ac.memory_gib={least + 1e-9}")
    recorded = run.status()["ac"]
    assert (recorded["asked"], recorded["chosen"]) == ("auto", "ac=full"), recorded
    first_line, *remaining_lines = (tmp_path / "auto" / "config.yaml").read_text().splitlines()
    assert first_line.startswith("# ac=auto: ac=full, planned 0.4 GiB of 0.4 (ac.memory_gib); ac=none would need")
    assert remaining_lines == ["ac:", "  mode: auto"], "a replay decides anew"
    [record] = [
        entry for entry in json.loads((tmp_path / "auto" / "pipeline.json").read_text()) if entry["node"] == "ac"
    ]
    assert record["summary"].startswith("full: 2 of 2 blocks")
    assert losses == train(tmp_path / "full", compose, "ac=full")[0] == plain
