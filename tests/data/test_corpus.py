"""The tokenised corpus on disk."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import CountingTokenizer
from titanyaml.data import corpus
from titanyaml.data.corpus import open_corpus
from titanyaml.data.sources import open_source
from titanyaml.errors import DataError
from titanyaml.tokenizer import ByteTokenizer


@pytest.fixture
def opened(write_lines: Callable, files_spec: Callable, tmp_path: Path):
    """``opened(texts, tokenizer)``: the corpus of these documents."""

    def build(texts: list[str], tokenizer: ByteTokenizer | None = None) -> corpus.Corpus:
        source = open_source(files_spec(write_lines(texts)), "train")
        return open_corpus(source, tokenizer or ByteTokenizer(), tmp_path / "cache")

    return build


def test_tokens_are_the_documents_each_with_its_end(opened: Callable, texts: list[str]) -> None:
    tokenised = opened(texts)
    assert tokenised.tokens.dtype == np.uint16
    assert tokenised.tokens.tolist() == [token for text in texts for token in [*text.encode(), 257]]
    assert len(tokenised.bounds) == len(texts) + 1
    for number, text in enumerate(texts):
        assert (
            bytes(tokenised.tokens[tokenised.bounds[number] : tokenised.bounds[number + 1] - 1].tolist()).decode()
            == text
        )
    assert tokenised.max_id == 257 and tokenised.max_id_document.endswith("corpus.jsonl:1")


def test_batches_change_nothing(opened: Callable, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_batch = opened(texts).tokens.tolist()
    monkeypatch.setattr(corpus, "_BATCH_CHARACTERS", 30)
    monkeypatch.setattr(corpus, "_BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(corpus, "_VERSION", "of this test")
    assert opened(texts).tokens.tolist() == in_one_batch


def test_it_is_encoded_once_for_each_content_and_tokenizer(opened: Callable) -> None:
    tokenizer = CountingTokenizer()
    first = opened(["a", "b"], tokenizer)
    assert opened(["a", "b"], tokenizer).key == first.key
    assert tokenizer.encoded == 2
    assert opened(["a", "c"], tokenizer).key != first.key
    second_tokenizer = CountingTokenizer()
    second_tokenizer.fingerprint = "other"
    assert opened(["a", "b"], second_tokenizer).key != first.key
    assert second_tokenizer.encoded == 2


def test_a_large_vocabulary_takes_four_bytes(opened: Callable) -> None:
    class Large(ByteTokenizer):
        vocab_size, eos_id, fingerprint = 70_001, 70_000, "large"

    tokenised = opened(["ab"], Large())
    assert tokenised.tokens.dtype == np.uint32 and tokenised.tokens.tolist() == [97, 98, 70_000]


def test_a_tokenizer_that_breaks_its_word_is_refused(opened: Callable) -> None:
    class Wrong(ByteTokenizer):
        vocab_size, fingerprint = 100, "wrong"

    with pytest.raises(DataError, match=r"corpus.jsonl:2 .*: token id 122 is outside .* of 100"):
        opened(["a" * 0 + "A", "z"], type("", (Wrong,), {"eos_id": 1})())


def test_a_corpus_without_text_is_an_error(opened: Callable, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document has any text"):
        opened(["", ""])
    assert not [path for path in (tmp_path / "cache" / "corpora").iterdir() if path.is_dir()]


def test_a_damaged_corpus_is_an_error(opened: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "corpora" / opened(["abc"]).key
    for name, content in (("tokens.bin", b"x"), ("bounds.npy", b"x"), ("meta.json", b"{")):
        intact = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(DataError, match="is damaged") as caught:
            opened(["abc"])
        assert str(folder) in caught.value.hint
        (folder / name).write_bytes(intact)
    assert opened(["abc"]).tokens.tolist() == [97, 98, 99, 257]


def test_a_killed_builder_leaves_no_partial_corpus(opened: Callable, tmp_path: Path) -> None:
    first = opened(["abc", "def"])
    folder = tmp_path / "cache" / "corpora" / first.key
    saved = folder.rename(tmp_path / "saved")
    code = (
        "import os, pathlib, signal, sys\n"
        "from titanyaml.config import schema\n"
        "from titanyaml.data.corpus import open_corpus\n"
        "from titanyaml.data.sources import open_source\n"
        "from titanyaml.tokenizer import ByteTokenizer\n"
        "import titanyaml.data.corpus as corpus\n"
        "corpus._BATCH_DOCUMENTS = 1\n"
        "class Dies(ByteTokenizer):\n"
        "    def encode_batch(self, texts):\n"
        "        if texts[0] == 'def':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().encode_batch(texts)\n"
        "cache = pathlib.Path(sys.argv[2])\n"
        "spec = schema.Data(kind='files', paths=[sys.argv[1]], cache_dir=str(cache), validation_fraction=0.0)\n"
        "open_corpus(open_source(spec, 'train'), Dies(), cache)\n"
    )
    arguments = [str(tmp_path / "corpus.jsonl"), str(tmp_path / "cache")]
    assert subprocess.run([sys.executable, "-c", code, *arguments]).returncode == -signal.SIGKILL
    assert not folder.exists() and list(folder.parent.glob(f".{first.key}.tmp-*/tokens.bin"))
    rebuilt = opened(["abc", "def"])
    assert rebuilt.key == first.key and not list(folder.parent.glob(".*tmp-*"))
    for name in ("tokens.bin", "bounds.npy", "meta.json", "manifest.json"):
        assert (folder / name).read_bytes() == (saved / name).read_bytes()


def test_the_manifest_is_kept(opened: Callable, tmp_path: Path) -> None:
    key = opened(["abc"]).key
    assert list(corpus.manifest(tmp_path / "cache", key)) == ["corpus.jsonl"]
    assert corpus.manifest(tmp_path / "cache", "unknown") is None
    meta = json.loads((tmp_path / "cache" / "corpora" / key / "meta.json").read_text())
    assert meta["num_documents"] == 1 and meta["tokenizer"] == ByteTokenizer.fingerprint


def test_a_long_job_tells_how_far_it_is(
    opened: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(corpus, "_PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, "titanyaml"):
        opened(["abc"])
    assert "tokenising 1 file(s)" in caplog.text and "1 documents, 4 tokens" in caplog.text
