"""A small corpus of files, and data whose tokens can be told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from titanyaml import data
from titanyaml.config import schema
from titanyaml.data.files import Document
from titanyaml.data.packing import Sample, pack
from titanyaml.data.sources import Source
from titanyaml.data.stream import StreamData
from titanyaml.tokenizer import ByteTokenizer


class CountingTokenizer(ByteTokenizer):
    """Bytes, counting how many texts were encoded."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.encoded += len(texts)
        return super().encode_batch(texts)


class Numbers:
    """A data set of ``size`` windows over the tokens 0, 1, 2, ...: token t stands in window t // S."""

    vocab_size = 1 << 40

    def __init__(self, size: int, seq_len: int = 4) -> None:
        self.size, self.seq_len = size, seq_len
        self.identity = {"size": size}
        self.fingerprint = f"numbers-{size}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        stream = np.arange(index * self.seq_len, (index + 1) * self.seq_len + 1)
        return pack([stream], seq_len=self.seq_len, pad_id=0)


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """``write_lines(["a", "b"], "name.jsonl")``: a JSON lines file with these texts."""

    def write(texts: Sequence[str], name: str = "corpus.jsonl", field: str = "text") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts)))
        return path

    return write


@pytest.fixture
def files_spec(tmp_path: Path) -> Callable[..., schema.Data]:
    """``files_spec(path, ...)``: configuration of files, with a cache of this test's own."""

    def spec(*paths: Path, **keys: object) -> schema.Data:
        keys = {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.0} | keys
        return schema.Data(kind="files", paths=[str(path) for path in paths], **keys)

    return spec


@pytest.fixture
def texts() -> list[str]:
    """60 documents of 1 to 43 characters, each different."""
    return [f"{number}:" + chr(97 + number % 26) * (number * 7 % 41) for number in range(60)]


@pytest.fixture
def packed(write_lines: Callable, files_spec: Callable, texts: list[str]):
    """``packed(seq_len=..., **keys of schema.Data)``: byte-level windows over ``texts``."""

    def build(seq_len: int = 16, split: str = "train", **keys: object):
        spec = files_spec(write_lines(texts), **keys)
        return data.build(spec, tokenizer=ByteTokenizer(), seq_len=seq_len, seed=0, split=split, vocab_size=258)

    return build


@pytest.fixture
def stream(texts: list[str]) -> Callable[..., StreamData]:
    """``stream(seq_len=..., fraction=..., split=...)`` over ``texts``; ``stream.opened`` lists the first rows read."""

    def build(
        seq_len: int = 16, fraction: float | None = None, split: str = "train", vocab_size: int = 258,
        texts: list[str] = texts,
    ) -> StreamData:  # fmt: skip
        def rows(skip: int) -> Iterator[Document]:
            build.opened.append(skip)
            return (Document(f"row {row}", text) for row, text in enumerate(texts[skip:], skip))

        source = Source("texts", {"name": "texts"}, lambda: rows(0), fraction=fraction)
        return StreamData(rows, ByteTokenizer(), source, split=split, seq_len=seq_len, vocab_size=vocab_size)

    build.opened = []
    return build


@pytest.fixture
def hub_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face datasets without network, with its cache in this test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf_cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
