"""From the configuration to data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.conftest import CountingTokenizer
from titanyaml import data
from titanyaml.config import schema
from titanyaml.data.windows import SyntheticData
from titanyaml.errors import ConfigError
from titanyaml.tokenizer import ByteTokenizer, Tokenizer


def build_both(spec: schema.Data, tokenizer: Tokenizer | None, *, seq_len: int, vocab_size: int) -> list:
    """The training and the validation split."""
    sizes = {"seq_len": seq_len, "vocab_size": vocab_size}
    return [data.build(spec, tokenizer=tokenizer, seed=0, split=split, **sizes) for split in ("train", "validation")]


def test_both_splits_tokenise_the_corpus_once(write_lines: Callable, files_spec: Callable, texts: list[str]) -> None:
    spec, tokenizer = files_spec(write_lines(texts), validation_fraction=0.2), CountingTokenizer()
    data.build(spec, tokenizer=tokenizer, seq_len=8, seed=0, split="train", vocab_size=258)
    assert tokenizer.encoded == len(texts)
    build_both(spec, tokenizer, seq_len=8, vocab_size=258)
    assert tokenizer.encoded == len(texts)


def test_synthetic_needs_neither_tokenizer_nor_cache(tmp_path: Path) -> None:
    spec = schema.Data(kind="synthetic", cache_dir=str(tmp_path / "cache"))
    dataset = data.build(spec, tokenizer=None, seq_len=8, seed=1, split="train", vocab_size=99)
    assert isinstance(dataset, SyntheticData) and len(dataset[3].tokens) == 8
    assert not (tmp_path / "cache").exists()


def test_validation_needs_something_held_out(write_lines: Callable, files_spec: Callable, texts: list[str]) -> None:
    spec = files_spec(write_lines(texts))
    with pytest.raises(ConfigError, match="nothing is held out"):
        data.build(spec, tokenizer=ByteTokenizer(), seq_len=8, seed=0, split="validation", vocab_size=258)


def test_a_vocabulary_is_trained_on_training_documents_only(write_lines: Callable, files_spec: Callable) -> None:
    common = [f"common words number {number}\n" for number in range(200)]
    spec = files_spec(write_lines(common), validation_fraction=0.1)
    held_out = set(data.documents(spec, "validation"))
    marked = [text.replace("common", "zqzqzqzq") if text in held_out else text for text in common]
    spec = files_spec(write_lines(marked), validation_fraction=0.1)
    tokenizer = data.build_tokenizer(schema.TokenizerConfig(kind="sentencepiece", vocab_size=300), spec)
    assert len(tokenizer.encode("zqzqzqzq")) == 8
    assert len(tokenizer.encode("common")) < 6
    cached = data.build_tokenizer(schema.TokenizerConfig(kind="sentencepiece", vocab_size=300), spec)
    assert cached.fingerprint == tokenizer.fingerprint
    assert len(list((Path(spec.cache_dir) / "tokenizers").glob("*/tokenizer.model"))) == 1


def test_the_default_corpus_end_to_end(tmp_path: Path) -> None:
    spec = schema.Data(kind="stdlib", max_files=60, cache_dir=str(tmp_path))
    settings = schema.TokenizerConfig(kind="sentencepiece", vocab_size=512, train_bytes=300_000)
    tokenizer = data.build_tokenizer(settings, spec)
    train, validation = build_both(spec, tokenizer, seq_len=64, vocab_size=512)
    documents = set(data.documents(spec, "train"))
    tokens = [token for index in range(len(train)) for token in train[index].tokens.tolist()][: train.num_tokens]
    ends = [index for index, token in enumerate(tokens) if token == tokenizer.eos_id]
    read = {tokenizer.decode(tokens[a + 1 : b]) for a, b in zip([-1, *ends], ends, strict=False)}
    assert read <= documents and len(read) >= len(documents) - 1
    assert validation.num_tokens > 0
