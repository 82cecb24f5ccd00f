"""The interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: every id is below it.
        bos_id: begin-of-sequence id; None where the vocabulary has none.
        eos_id: end-of-document id, the separator of documents.
        fingerprint: equal for two tokenizers exactly when they give the same ids.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens, even where the text spells one out."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, on all cores where the library can."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens have none."""
