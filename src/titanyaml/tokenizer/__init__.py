"""Text to token ids: bytes, sentencepiece (given or trained on the corpus) and Hugging Face tokenizer.json."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from titanyaml.config import schema
from titanyaml.errors import ConfigError, DataError


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


class ByteTokenizer:
    """One token per byte of UTF-8 (ids 0-255); 256 begins a sequence, 257 ends a document."""

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


def build(
    spec: schema.TokenizerConfig, *, corpus: Callable[[], Iterator[str]], cache_dir: Path, corpus_key: Callable[[], str]
) -> Tokenizer:
    """The tokenizer that ``spec`` describes.

    Args:
        corpus: gives the documents from the start. corpus_key: its fingerprint. Both are called only to train.

    Raises:
        ConfigError: a key that this kind needs is missing or impossible.
        DataError: the file is missing, unreadable, has no end-of-document token or another size than configured.
    """
    # each library is imported where it is used: nobody should need sentencepiece to train on bytes
    if spec.kind == "bytes":
        return ByteTokenizer()
    if spec.kind == "hf":
        from titanyaml.tokenizer.hf import HfTokenizer

        if spec.path is None:
            hint = "tokenizer.path=/path/to/tokenizer.json"
            raise ConfigError("tokenizer=hf needs a file", key="tokenizer.path", hint=hint)
        return HfTokenizer(Path(spec.path).expanduser(), eos_token=spec.eos_token)
    if spec.kind == "sentencepiece":
        from titanyaml.tokenizer.spm import SentencePieceTokenizer, trained_model

        if spec.path is None:
            path = trained_model(spec, corpus=corpus, cache_dir=Path(cache_dir), corpus_key=corpus_key)
            return SentencePieceTokenizer(path, eos_token=spec.eos_token)
        tokenizer = SentencePieceTokenizer(Path(spec.path).expanduser(), eos_token=spec.eos_token)
        if spec.vocab_size not in (None, tokenizer.vocab_size):
            message = f"{spec.path} has {tokenizer.vocab_size} tokens, not {spec.vocab_size}"
            hint = f"tokenizer.vocab_size={tokenizer.vocab_size} or null"
            raise DataError(message, key="tokenizer.vocab_size", hint=hint)
        return tokenizer
    raise ConfigError(f"there is no tokenizer {spec.kind!r}", key="tokenizer.kind", hint="tokenizer=bytes")
