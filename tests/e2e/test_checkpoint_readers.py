"""What reads a finished run: ``runner=eval``, ``runner=sample``, and the replay of its config.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.helpers import Cli, checkpoints, last_bits, metrics, records, status
from titanyaml.errors import EXIT_CONFIG


def test_eval_measures_what_training_measured(cli: Cli, straight: Path) -> None:
    common = ("runner=eval", "validation.batches=2", "tracker=none")
    one_rank, two_ranks, refused, nowhere = cli.bare.together(
        [
            (*common, f"runner.checkpoint={straight}", "train.local_batch=4", "run.id=same"),
            (
                *common,
                f"runner.checkpoint={checkpoints(straight)[-1]}",
                "train.local_batch=2",
                "parallel=fsdp2",
                "run.id=two",
            ),
            (*common, f"runner.checkpoint={straight}", "model=llama3_debug", "run.id=refused"),
            (*common, "runner.checkpoint=nowhere/at/all", "run.id=nowhere"),
        ]
    )
    trained = records(straight)[-1]
    assert one_rank.returncode == 0, one_rank.stderr
    [record] = records(cli.run("same"))
    assert (record["step"], record["validation_loss"]) == (20, trained["validation_loss"])
    assert status(cli.run("same"))["metric"] == trained["validation_loss"]
    assert two_ranks.returncode == 0, two_ranks.stderr
    assert records(cli.run("two"))[0]["validation_loss"] == pytest.approx(trained["validation_loss"], rel=1e-6)
    assert refused.returncode == EXIT_CONFIG
    assert "model: is fixed by the checkpoint" in refused.stderr and "leave out model" in refused.stderr
    assert nowhere.returncode == EXIT_CONFIG and "nowhere/at/all" in nowhere.stderr
    # reading a run leaves it as it was
    assert status(straight)["state"] == "done" and len(checkpoints(straight)) == 1


def test_sample_writes_the_same_text_for_the_same_seed(cli: Cli, straight: Path) -> None:
    common = (
        "runner=sample",
        f"runner.checkpoint={straight}",
        "runner.prompt=abc",
        "runner.max_new_tokens=24",
        "runner.temperature=1.0",
        "tracker=none",
    )
    processes = cli.bare.together(
        [(*common, f"run.seed={seed}", f"run.id={run_id}") for seed, run_id in ((1, "a"), (1, "b"), (2, "c"))]
    )
    assert [process.returncode for process in processes] == [0, 0, 0], processes[0].stderr
    texts = [(cli.run(run_id) / "sample.txt").read_text() for run_id in "abc"]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("abc") and len(texts[0]) > 10
    assert processes[0].stdout.startswith("abc") and processes[0].stdout == processes[1].stdout != processes[2].stdout
    assert 0 < status(cli.run("a"))["tokens"] <= 24


def test_the_configuration_of_a_run_repeats_it_elsewhere(cli: Cli, straight: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*")}
    replay = ("--config-path", str(straight), "--config-name", "config")
    repeated, reseeded = cli.bare.together([replay, (*replay, "run.seed=1", "run.id=other", "train.steps=8")])
    assert repeated.returncode == 0, repeated.stderr
    assert reseeded.returncode == 0, reseeded.stderr
    [new] = [path for path in cli.run("other").parent.iterdir() if path.name != "other"]
    assert new.name not in ("straight", "other")
    assert metrics(new) == metrics(straight) and last_bits(new) == last_bits(straight)
    assert status(new)["config_hash"] == status(straight)["config_hash"]
    assert len(records(cli.run("other"))) == 8
    assert not {row[1] for row in metrics(cli.run("other"))} & {row[1] for row in metrics(straight)}
    assert before == {path: path.stat().st_mtime_ns for path in straight.rglob("*")}
