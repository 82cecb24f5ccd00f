"""A sentencepiece .model, given or trained on the corpus, once."""

import hashlib
import io
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from titanyaml.config import schema
from titanyaml.errors import ConfigError, DataError
from titanyaml.tokenizer.cache import build_once

log = logging.getLogger("titanyaml.tokenizer")

# sentencepiece writes a space as this character, so that the character itself would come back as a space
_SPACE_MARK = "\u2581"
# what normalisation would change: leading and double blanks, line ends, a ligature, a fraction, NUL
_PROBE = " a  b\t c\r\n\n  \ufb01 \u00bd\x00 "
# part of the cache key: to be raised with every change of how a vocabulary is trained
_VERSION = 1
_LINE_CHARACTERS = 4096


class SentencePieceTokenizer:
    """Wraps ``sentencepiece.SentencePieceProcessor``.

    A model that keeps text as it is (identity normalisation and byte fallback, as all that are trained here) returns
    every string exactly, U+2581 included. Any other model is used as it is, and a log line says that it changes text.
    ``eos_token``: the piece that ends a document; None: the model's own end of sentence.
    """

    def __init__(self, path: Path, *, eos_token: str | None = None) -> None:
        import sentencepiece

        try:
            content = path.read_bytes()
        except OSError as error:
            hint = "a sentencepiece .model, or null to train one on the corpus"
            raise DataError(f"cannot read {path}: {error.strerror}", key="tokenizer.path", hint=hint) from error
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path} is not a sentencepiece model: {error}", key="tokenizer.path") from error
        self.vocab_size: int = self._model.GetPieceSize()
        if self.vocab_size == 0:  # sentencepiece loads an empty file without complaint
            raise DataError(f"{path} is not a sentencepiece model: it has no pieces", key="tokenizer.path")
        self.bos_id: int | None = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.eos_id = self._find_eos(path, eos_token)
        self.fingerprint = hashlib.sha256(content + f"\0{self.eos_id}".encode()).hexdigest()
        mark_bytes = [self._model.PieceToId(f"<0x{b:02X}>") for b in _SPACE_MARK.encode()]
        self._mark_ids: list[int] = mark_bytes if all(self._model.IsByte(i) for i in mark_bytes) else []
        self.lossless = bool(self._mark_ids) and self._model.Decode(self._model.Encode(_PROBE)) == _PROBE
        if not self.lossless:
            log.info("%s normalises text: decoding does not give back every document exactly", path)

    def encode(self, text: str) -> list[int]:
        # the text is split at U+2581, which is written as its three bytes
        first, *parts = text.split(_SPACE_MARK) if self.lossless else [text]
        ids: list[int] = self._model.Encode(first)
        for part in parts:
            ids = ids + self._mark_ids + self._model.Encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # the library's threads take the texts that need no splitting, which are nearly all
        plain = [not self.lossless or _SPACE_MARK not in text for text in texts]
        encoded = iter(self._model.Encode([t for t, p in zip(texts, plain, strict=True) if p], num_threads=-1))
        return [next(encoded) if p else self.encode(t) for t, p in zip(texts, plain, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.Decode([int(i) for i in ids]))

    def _find_eos(self, path: Path, eos_token: str | None) -> int:
        if eos_token is None:
            eos_id: int = self._model.eos_id()
        else:
            eos_id = self._model.PieceToId(eos_token)  # an unknown piece gets the id of <unk>
            eos_id = eos_id if self._model.IdToPiece(eos_id) == eos_token else -1
        if eos_id < 0:
            lack = f"no piece {eos_token!r}" if eos_token else "no end-of-sentence piece"
            raise DataError(f"{path} has {lack}", key="tokenizer.eos_token", hint="tokenizer.eos_token=<a piece of it>")
        return eos_id


def trained_model(
    spec: schema.TokenizerConfig, *, corpus: Callable[[], Iterator[str]], cache_dir: Path, corpus_key: Callable[[], str]
) -> Path:
    """The .model for this corpus and these settings, trained now if the cache has none; safe for many processes."""
    if spec.vocab_size is None:
        message, hint = "a vocabulary that is trained needs a size", "tokenizer.vocab_size=4096"
        raise ConfigError(message, key="tokenizer.vocab_size", hint=hint)
    settings = {"version": _VERSION, "corpus": corpus_key(), "vocab_size": spec.vocab_size}
    settings |= {"model_type": spec.model_type, "train_bytes": spec.train_bytes}
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]

    def train(folder: Path) -> None:
        start = time.monotonic()
        model = _train(spec, corpus)
        (folder / "tokenizer.model").write_bytes(model)
        (folder / "settings.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        log.info("trained a sentencepiece vocabulary in %.1f s", time.monotonic() - start)

    folder = build_once(cache_dir / "tokenizers" / name, train, what="the sentencepiece vocabulary")
    return folder / "tokenizer.model"


def _train(spec: schema.TokenizerConfig, corpus: Callable[[], Iterator[str]]) -> bytes:
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
