"""One token per byte of UTF-8, and two special tokens."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 begins a sequence, 257 ends a document."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id = 257
    fingerprint = "bytes-258"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # a model may write bytes that are not UTF-8: they become U+FFFD instead of an exception
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
