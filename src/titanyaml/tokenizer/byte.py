"""One token a byte of UTF-8, and two special tokens."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 begins a sequence, 257 ends a document."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    fingerprint = "bytes-258"

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 (a model may write them) become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
