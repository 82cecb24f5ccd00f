"""Training a sentencepiece vocabulary on the corpus, once."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from titanyaml.config import schema
from titanyaml.errors import ConfigError, DataError
from titanyaml.tokenizer.cache import build_once

log = logging.getLogger("titanyaml.tokenizer")

# part of the cache key: to be raised with every change of how a vocabulary is trained
_VERSION = 1
_LINE_CHARACTERS = 4096


def trained_model(
    spec: schema.Tokenizer, *, corpus: Callable[[], Iterator[str]], cache_dir: Path, corpus_key: Callable[[], str]
) -> Path:
    """The .model for this corpus and these settings, trained now if the cache has none; safe for many processes."""
    if spec.vocab_size is None:
        message, hint = "a vocabulary that is trained needs a size", "tokenizer.vocab_size=4096"
        raise ConfigError(message, key="tokenizer.vocab_size", hint=hint)
    settings = {
        "version": _VERSION,
        "corpus": corpus_key(),
        "vocab_size": spec.vocab_size,
        "model_type": spec.model_type,
        "train_bytes": spec.train_bytes,
    }
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]

    def train(folder: Path) -> None:
        start = time.monotonic()
        model = _train(spec, corpus)
        (folder / "tokenizer.model").write_bytes(model)
        (folder / "settings.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        log.info("trained a sentencepiece vocabulary in %.1f s", time.monotonic() - start)

    folder = build_once(cache_dir / "tokenizers" / name, train, what="the sentencepiece vocabulary")
    return folder / "tokenizer.model"


def _train(spec: schema.Tokenizer, corpus: Callable[[], Iterator[str]]) -> bytes:
    import sentencepiece

    lines = _lines(corpus(), spec.train_bytes)
    first = next(lines, None)
    if first is None:
        raise DataError("there is no text to train a vocabulary on", key="data")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=itertools.chain([first], lines),
            model_writer=model,
            model_type=spec.model_type,
            vocab_size=spec.vocab_size,
            hard_vocab_limit=False,  # a small corpus gives a smaller vocabulary, logged below
            byte_fallback=True,  # no text is unknown
            character_coverage=0.9995,  # rarer characters are written as bytes
            normalization_rule_name="identity",  # this and the next two: decoding gives the text back
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # indentation: a third fewer tokens on code
            max_sentence_length=4 * _LINE_CHARACTERS,  # in bytes; longer lines would be skipped
            num_threads=2,  # fixed: the result must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        message = f"sentencepiece cannot train {spec.vocab_size} tokens on this corpus: {error}"
        hint = "a larger vocabulary: it must hold 256 bytes, 3 special tokens and the corpus's characters"
        raise ConfigError(message, key="tokenizer.vocab_size", hint=hint) from error
    size = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).GetPieceSize()
    if size != spec.vocab_size:
        log.warning("the corpus gave only %d of tokenizer.vocab_size=%d tokens", size, spec.vocab_size)
    return model.getvalue()


def _lines(documents: Iterator[str], limit: int) -> Iterator[str]:
    """Lines with their ends, at most ``_LINE_CHARACTERS`` each, until ``limit`` bytes are read."""
    num_bytes = 0
    for document in documents:
        for line in document.splitlines(keepends=True):
            for start in range(0, len(line), _LINE_CHARACTERS):
                # the trainer ends a line at NUL
                piece = line[start : start + _LINE_CHARACTERS].replace("\0", "")
                num_bytes += len(piece.encode())
                if num_bytes > limit:
                    return
                if piece:
                    yield piece
