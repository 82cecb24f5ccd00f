"""Documents of a split, and what identifies them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from titanyaml import data
from titanyaml.config import schema
from titanyaml.data.order import split_documents
from titanyaml.data.sources import difference, open_source
from titanyaml.errors import ConfigError, DataError


@pytest.mark.parametrize("number", [2, 3, 7, 60, 500])
@pytest.mark.parametrize("fraction", [0.0005, 0.02, 0.5])
def test_documents_are_split_as_the_tokens_are(
    write_lines: Callable, files_spec: Callable, number: int, fraction: float
) -> None:
    spec = files_spec(write_lines([f"text {i}" for i in range(number)]), validation_fraction=fraction)
    for split in ("train", "validation"):
        expected = {f"text {index}" for index in split_documents(number, fraction, split)}
        split_texts = list(data.documents(spec, split))
        assert set(split_texts) == expected and len(split_texts) == len(expected)


def test_empty_documents_have_no_index(
    write_lines: Callable, files_spec: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    spec = files_spec(write_lines(["a", "", "b", ""]))
    with caplog.at_level(logging.INFO, "titanyaml"):
        assert list(data.documents(spec, "train")) == ["a", "b"]
    assert "2 empty documents left out" in caplog.text


def test_an_empty_split_is_an_error(write_lines: Callable, files_spec: Callable) -> None:
    path = write_lines(["only one"])
    with pytest.raises(DataError, match="leaves no document for train"):
        list(data.documents(files_spec(path, validation_fraction=0.5), "train"))
    with pytest.raises(DataError, match="leaves no document for validation"):
        list(data.documents(files_spec(path), "validation"))


def test_the_fingerprint_is_content_order_and_field(
    write_lines: Callable, files_spec: Callable, tmp_path: Path
) -> None:
    a, b = write_lines(["x"], "a.jsonl"), write_lines(["y"], "b.jsonl")
    first = open_source(files_spec(a, b), "train").fingerprint
    assert open_source(files_spec(b, a), "train").fingerprint != first
    assert open_source(files_spec(a), "train").fingerprint != first
    assert open_source(files_spec(a, b, text_field="other"), "train").fingerprint != first
    assert open_source(files_spec(a, b, max_files=1), "train").fingerprint != first
    assert open_source(files_spec(a, b, validation_fraction=0.3), "train").fingerprint == first
    write_lines(["z"], "b.jsonl")
    assert open_source(files_spec(a, b), "train").fingerprint != first


def test_max_files_takes_the_first(tmp_path: Path) -> None:
    spec = schema.Data(kind="stdlib", max_files=12, cache_dir=str(tmp_path))
    source = open_source(spec, "train")
    assert len(source.manifest) == 12 and source.total_bytes > 0
    assert len(list(source.read())) <= 12


def test_synthetic_has_no_documents() -> None:
    with pytest.raises(ConfigError, match="holds no text"):
        list(data.documents(schema.Data(kind="synthetic"), "train"))


def test_difference_names_files() -> None:
    old, new = {"a": "1 x", "b": "1 y"}, {"b": "1 z", "c": "1 w"}
    assert difference(old, new) == ["removed a", "added c", "changed b"]
