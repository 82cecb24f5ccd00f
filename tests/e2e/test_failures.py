"""What goes wrong ends with the promised exit code, says what to do, and leaves the good state alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.e2e.helpers import SIZES, TRAINING, Cli, checkpoints, events, records, status, tensors
from titanyaml.errors import EXIT_CONFIG, EXIT_DATA, EXIT_NON_FINITE


def test_a_learning_rate_out_of_this_world(cli: Cli) -> None:
    result = cli(*TRAINING, "optim.lr=1e30", "train.max_norm=null", "checkpoint.interval=1", "run.id=a")
    run = cli.run("a")
    assert result.returncode == EXIT_NON_FINITE, result.stderr
    end = status(run)
    assert (end["state"], end["exit_code"], end["error"]["type"]) == ("failed", EXIT_NON_FINITE, "NonFiniteError")
    assert "no update was made" in end["reason"] or "was not saved" in end["reason"]
    assert "a lower optim.lr" in result.stderr or "earlier checkpoints are untouched" in result.stderr
    assert events(run, "non_finite") and records(run)
    newest = checkpoints(run)[-1]
    assert all(tensor.isfinite().all() for tensor in tensors(newest).values())
    assert newest.name == f"step-{end['step']:08}"


def big_tokenizer(folder: Path) -> Path:
    """A tokenizer.json with 300 ids."""
    path = folder / "tokenizer.json"
    vocabulary = {"<unk>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, 300)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(path))
    return path


def test_data_that_does_not_fit_is_exit_3(cli: Cli) -> None:
    lines = cli.folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"body": f"text {number}"}) + "\n" for number in range(50)))
    tokenizer = big_tokenizer(cli.folder)
    cases = {
        "missing": ("data=files", "data.paths=[nowhere/*.txt]"),
        "field": ("data=files", f"data.paths=[{lines}]"),
        "vocabulary": ("tokenizer=hf", f"tokenizer.path={tokenizer}", "tokenizer.eos_token='<eos>'"),
    }
    expected = {
        "missing": ("nowhere/*.txt matches no file", "data.paths"),
        "field": ("lines.jsonl:1: no field 'text'; there is: 'body'", "data.text_field"),
        "vocabulary": ("the tokenizer has 300 ids, the model's embedding 258 rows", "model.vocab_size"),
    }
    for name, result in zip(
        cases, cli.together([(*TRAINING, *case, f"run.id={n}") for n, case in cases.items()]), strict=True
    ):
        text, key = expected[name]
        assert result.returncode == EXIT_DATA, (name, result.stderr)
        assert text in result.stderr and key in result.stderr and "Traceback" not in result.stderr
        assert status(cli.run(name))["state"] == "failed" and text in status(cli.run(name))["reason"]
        assert not records(cli.run(name)) and not checkpoints(cli.run(name))


@pytest.mark.parametrize("runner", ["train", "check"])
def test_a_sequence_longer_than_the_model_is_exit_2(cli: Cli, runner: str) -> None:
    result = cli(*SIZES, "train.seq_len=128", f"runner={runner}", "run.id=a")
    assert result.returncode == EXIT_CONFIG
    assert "train.seq_len" in result.stderr and "model.max_seq_len" in result.stderr
    assert not cli.run("a").exists()
