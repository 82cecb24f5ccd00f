"""Sentencepiece models, given and trained."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tokenizer.conftest import WEIRD, build, small_corpus
from titanyaml.config import schema
from titanyaml.errors import ConfigError, DataError
from titanyaml.tokenizer import Tokenizer
from titanyaml.tokenizer.spm import SentencePieceTokenizer, trained_model

SPEC = schema.TokenizerConfig(kind="sentencepiece", vocab_size=400)


def foreign_model(path: Path, **settings: object) -> Path:
    """A model as sentencepiece trains it by default: normalising, with a dummy prefix."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=small_corpus(), model_writer=model, vocab_size=60, hard_vocab_limit=False,
        minloglevel=2, **settings,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("text", WEIRD)
def test_round_trip(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_round_trip_of_every_character_and_in_a_batch(trained: Tokenizer) -> None:
    all_characters = "".join(map(chr, range(0x3000)))
    texts = [all_characters, *WEIRD, "\u2581".join(WEIRD)]
    encoded = trained.encode_batch(texts)
    assert encoded == [trained.encode(text) for text in texts]
    assert [trained.decode(ids) for ids in encoded] == texts
    assert max(max(ids, default=0) for ids in encoded) < trained.vocab_size == 400


def test_special_tokens_come_from_no_text_and_have_none(trained: Tokenizer) -> None:
    special = {trained.bos_id, trained.eos_id}
    assert len(special) == 2
    assert not special & set(trained.encode("".join(WEIRD)))
    assert trained.decode([trained.bos_id, *trained.encode("x"), trained.eos_id]) == "x"


def test_indentation_is_one_token(trained: Tokenizer) -> None:
    assert len(trained.encode("        ")) == 1


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_is_deterministic_and_cached_by_what_it_depends_on(tmp_path: Path, model_type: str) -> None:
    spec = schema.TokenizerConfig(kind="sentencepiece", vocab_size=330, model_type=model_type)
    small = {"corpus": small_corpus, "corpus_key": lambda: "small"}
    first = trained_model(spec, cache_dir=tmp_path / "a", **small)
    second = trained_model(spec, cache_dir=tmp_path / "b", **small)
    assert first.read_bytes() == second.read_bytes()
    assert first.parent.name == second.parent.name
    larger = schema.TokenizerConfig(kind="sentencepiece", vocab_size=331, model_type=model_type)
    assert trained_model(larger, cache_dir=tmp_path / "a", **small).parent != first.parent
    other_text = {"corpus": lambda: iter(["other text " * 50]), "corpus_key": lambda: "other text"}
    changed = trained_model(spec, cache_dir=tmp_path / "a", **other_text)
    assert changed.parent != first.parent


def test_a_cached_vocabulary_reads_no_corpus(tmp_path: Path, no_corpus: Callable) -> None:
    first = build(SPEC, corpus=small_corpus, cache_dir=tmp_path, corpus_key=lambda: "key")
    cached = build(SPEC, corpus=no_corpus, cache_dir=tmp_path, corpus_key=lambda: "key")
    assert cached.fingerprint == first.fingerprint


def test_two_processes_train_once(tmp_path: Path) -> None:
    code = (
        "import logging, pathlib, sys; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from tests.tokenizer.conftest import build, small_corpus\n"
        "from titanyaml.config import schema\n"
        "spec = schema.TokenizerConfig(kind='sentencepiece', vocab_size=400)\n"
        "corpus = lambda: (text for _ in range(30) for text in small_corpus())\n"
        "sys.stdin.readline()\n"
        "print(build(spec, corpus=corpus, cache_dir=pathlib.Path(sys.argv[1])).fingerprint)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) for _ in range(2)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum("trained a sentencepiece vocabulary" in errors for _, errors in outputs) == 1
    assert len([path for path in (tmp_path / "tokenizers").iterdir() if path.is_dir()]) == 1


def test_a_small_corpus_gives_fewer_tokens_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = schema.TokenizerConfig(kind="sentencepiece", vocab_size=5000)
    with caplog.at_level(logging.WARNING, "titanyaml"):
        tokenizer = build(spec, corpus=small_corpus, cache_dir=tmp_path)
    assert tokenizer.vocab_size < 5000
    assert f"only {tokenizer.vocab_size} of tokenizer.vocab_size=5000" in caplog.text


def test_only_train_bytes_are_read(tmp_path: Path) -> None:
    spec = schema.TokenizerConfig(kind="sentencepiece", vocab_size=300, train_bytes=2000)
    lines = 0

    def endless():
        nonlocal lines
        while True:
            lines += 1
            yield "a line of text with words in it\n"

    build(spec, corpus=endless, cache_dir=tmp_path, corpus_key=lambda: "endless")
    assert lines < 100


def test_a_foreign_model_is_used_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = foreign_model(tmp_path / "a.model")
    with caplog.at_level(logging.INFO, "titanyaml"):
        tokenizer = SentencePieceTokenizer(path)
    assert not tokenizer.lossless and "normalises text" in caplog.text
    assert tokenizer.encode("a\u2581b") == tokenizer._model.Encode("a\u2581b")
    assert tokenizer.eos_id == 2


def test_errors(tmp_path: Path, no_corpus: Callable) -> None:
    def build_spec(**keys: object) -> Tokenizer:
        return build(schema.TokenizerConfig(kind="sentencepiece", **keys), corpus=no_corpus, cache_dir=tmp_path)

    with pytest.raises(DataError, match="cannot read .*missing.model: No such file"):
        build_spec(path=str(tmp_path / "missing.model"))
    (tmp_path / "bad.model").write_bytes(b"not a model at all")
    (tmp_path / "empty.model").write_bytes(b"")
    for name in ("bad.model", "empty.model"):
        with pytest.raises(DataError, match=f"{name} is not a sentencepiece model"):
            build_spec(path=str(tmp_path / name))
    no_eos = foreign_model(tmp_path / "no_eos.model", eos_id=-1)
    with pytest.raises(DataError, match="no end-of-sentence piece") as caught:
        build_spec(path=str(no_eos))
    assert caught.value.key == "tokenizer.eos_token"
    assert build_spec(path=str(no_eos), eos_token="<s>").eos_id == build_spec(path=str(no_eos), eos_token="<s>").bos_id
    with pytest.raises(DataError, match="no piece '<nothing>'"):
        build_spec(path=str(no_eos), eos_token="<nothing>")
    with pytest.raises(DataError, match="tokens, not 999"):
        build_spec(path=str(no_eos), eos_token="<s>", vocab_size=999)


def test_errors_of_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a size"):
        build(schema.TokenizerConfig(kind="sentencepiece"), corpus=small_corpus, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="cannot train 20 tokens"):
        build(schema.TokenizerConfig(kind="sentencepiece", vocab_size=20), corpus=small_corpus, cache_dir=tmp_path)
    with pytest.raises(DataError, match="no text"):
        build(SPEC, corpus=lambda: iter([]), cache_dir=tmp_path)
    assert not [path for path in (tmp_path / "tokenizers").iterdir() if path.is_dir()]
