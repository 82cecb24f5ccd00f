"""Hugging Face datasets in a local folder: no network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titanyaml import data
from titanyaml.config import schema
from titanyaml.data import hub
from titanyaml.data.stream import Cursor
from titanyaml.errors import ConfigError, DataError
from titanyaml.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("hub_here")


@pytest.fixture
def folder(write_lines: Callable, texts: list[str], tmp_path: Path) -> Path:
    """A folder as the hub has them: train in two files, and test."""
    write_lines(texts[:20], "set/train-0.jsonl", field="body")
    write_lines(texts[20:40], "set/train-1.jsonl", field="body")
    write_lines(texts[40:], "set/test-0.jsonl", field="body")
    return tmp_path / "set"


@pytest.fixture
def hf_spec(folder: Path, tmp_path: Path) -> Callable[..., schema.Data]:
    def spec(**keys: object) -> schema.Data:
        keys = {"dataset": str(folder), "text_field": "body", "cache_dir": str(tmp_path / "cache")} | keys
        return schema.Data(kind="hf", **keys)

    return spec


def build(spec: schema.Data, split: str = "train"):
    return data.build(spec, tokenizer=ByteTokenizer(), seq_len=16, seed=0, split=split, vocab_size=258)


def test_the_splits_of_the_dataset(hf_spec: Callable, texts: list[str]) -> None:
    spec = hf_spec(validation_split="test")
    assert list(data.documents(spec, "train")) == texts[:40]
    assert list(data.documents(spec, "validation")) == texts[40:]
    for split in ("train", "validation"):
        build(spec, split)
    assert len(list((Path(spec.cache_dir) / "corpora").glob("*/meta.json"))) == 2


def test_validation_held_out_of_the_split(hf_spec: Callable, texts: list[str]) -> None:
    spec = hf_spec(validation_fraction=0.2)
    train, validation = (set(data.documents(spec, split)) for split in ("train", "validation"))
    assert validation and not train & validation and train | validation == set(texts[:40])


def test_a_stream_is_the_dataset_in_order_and_resumes_by_row(hf_spec: Callable) -> None:
    packed = build(hf_spec(validation_fraction=0.1))
    streamed = build(hf_spec(validation_fraction=0.1, streaming=True, shuffle=False))
    count = 2 * len(packed)
    samples = list(itertools.islice(streamed.samples(Cursor()), count))
    for number, (sample, _) in enumerate(samples):
        assert np.array_equal(sample.tokens, packed[number % len(packed)].tokens)
    for number in range(0, count - 1, 4):
        sample, after = next(streamed.samples(samples[number][1]))
        assert np.array_equal(sample.labels, samples[number + 1][0].labels) and after == samples[number + 1][1]


def test_a_cached_corpus_needs_no_dataset_and_new_content_is_noticed(
    hf_spec: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(hf_spec())
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_load", lambda *_: pytest.fail("the dataset was loaded"))
        assert build(hf_spec()).fingerprint == first.fingerprint
    (folder / "train-0.jsonl").write_text(json.dumps({"body": "new", "id": 0}) + "\n")
    assert build(hf_spec()).fingerprint != first.fingerprint


def test_a_dataset_saved_to_disk(tmp_path: Path, hf_spec: Callable, texts: list[str]) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"body": texts})
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset, "dev": dataset.select(range(5))}).save_to_disk(str(tmp_path / "two"))
    assert list(data.documents(hf_spec(dataset=str(tmp_path / "one"), validation_fraction=0.0), "train")) == texts
    two = hf_spec(dataset=str(tmp_path / "two"), validation_split="dev", streaming=True)
    assert list(data.documents(two, "train")) == texts
    assert list(data.documents(two, "validation")) == texts[:5]
    with pytest.raises(DataError, match="no split 'other'; it has: train, dev"):
        list(data.documents(hf_spec(dataset=str(tmp_path / "two"), split="other"), "train"))
    with pytest.raises(DataError, match="holds only the split 'train', not 'dev'"):
        list(data.documents(hf_spec(dataset=str(tmp_path / "one"), split="dev"), "train"))


def test_errors(hf_spec: Callable, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no dataset is named"):
        build(hf_spec(dataset=None))
    for streaming in (False, True):
        with pytest.raises(DataError, match="no field 'text'; there is: 'body', 'id'"):
            list(data.documents(hf_spec(text_field="text", streaming=streaming), "train"))
        with pytest.raises(DataError, match="cannot load .*nothing"):
            list(data.documents(hf_spec(split="nothing", streaming=streaming), "train"))
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        build(hf_spec(dataset=str(tmp_path / "void")))
    with pytest.raises(ConfigError, match="read in its own order"):
        build(hf_spec(streaming=True))
    with pytest.raises(DataError, match="cannot load no-such-owner/no-such-dataset"):
        build(hf_spec(dataset="no-such-owner/no-such-dataset"))
