"""A sentencepiece .model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from titanyaml.errors import DataError

log = logging.getLogger("titanyaml.tokenizer")

# sentencepiece writes a space as this character, so that one that stands in the text would come back as a space
_SPACE_MARK = "\u2581"
_PROBE = " a  b\t c\r\n\n  \ufb01 \u00bd\x00 "


class SentencePieceTokenizer:
    """Wraps ``sentencepiece.SentencePieceProcessor``.

    A model that keeps text as it is (identity normalisation, byte fallback: all that are trained here) round-trips
    every string, U+2581 included. Any other model is used as it is, and a log line says that it changes text.

    Args:
        path: the .model file.
        eos_token: the piece that ends a document; None: the model's own end of sentence.

    Raises:
        DataError: no such file, not a model, or no end-of-document piece.
    """

    def __init__(self, path: Path, *, eos_token: str | None = None) -> None:
        import sentencepiece

        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error.strerror}",
                key="tokenizer.path",
                hint="a sentencepiece .model, or null to train one on the corpus",
            ) from error
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path} is not a sentencepiece model: {error}", key="tokenizer.path") from error
        self.vocab_size = self._model.GetPieceSize()
        if self.vocab_size == 0:
            raise DataError(f"{path} is not a sentencepiece model: it has no pieces", key="tokenizer.path")
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.eos_id = self._find_eos(path, eos_token)
        self.fingerprint = hashlib.sha256(content + f"\0{self.eos_id}".encode()).hexdigest()
        mark_bytes = [self._model.PieceToId(f"<0x{b:02X}>") for b in _SPACE_MARK.encode()]
        self._mark_ids = mark_bytes if all(self._model.IsByte(i) for i in mark_bytes) else []
        self.lossless = bool(self._mark_ids) and self._model.Decode(self._model.Encode(_PROBE)) == _PROBE
        if not self.lossless:
            log.info("%s normalises text: decoding does not give back every document exactly", path)

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens."""
        if not self.lossless or _SPACE_MARK not in text:
            return self._model.Encode(text)
        parts = [self._model.Encode(part) for part in text.split(_SPACE_MARK)]
        ids = parts[0]
        for part in parts[1:]:
            ids = ids + self._mark_ids + part
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on all cores."""
        plain = [not self.lossless or _SPACE_MARK not in text for text in texts]
        encoded = iter(self._model.Encode([t for t, p in zip(texts, plain, strict=True) if p], num_threads=-1))
        return [next(encoded) if p else self.encode(t) for t, p in zip(texts, plain, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens have none."""
        return self._model.Decode([int(i) for i in ids])

    def _find_eos(self, path: Path, eos_token: str | None) -> int:
        if eos_token is None:
            eos_id = self._model.eos_id()
        else:
            eos_id = self._model.PieceToId(eos_token)
            eos_id = eos_id if self._model.IdToPiece(eos_id) == eos_token else -1
        if eos_id < 0:
            what = f"no piece {eos_token!r}" if eos_token else "no end-of-sentence piece"
            raise DataError(f"{path} has {what}", key="tokenizer.eos_token", hint="tokenizer.eos_token=<a piece of it>")
        return eos_id
