"""From the configuration to a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from titanyaml.config import schema
from titanyaml.errors import ConfigError, DataError
from titanyaml.tokenizer.protocol import Tokenizer


def build(
    spec: schema.Tokenizer,
    *,
    corpus: Callable[[], Iterator[str]],
    cache_dir: Path,
    corpus_key: Callable[[], str] | None = None,
) -> Tokenizer:
    """The tokenizer that ``spec`` describes; each library is imported only where it is used.

    Args:
        corpus: gives the documents from the start; called only where a vocabulary has to be trained.
        cache_dir: folder that keeps trained vocabularies.
        corpus_key: fingerprint of that corpus, called only for a trained vocabulary; without it the training text
            itself is read and hashed at every start.

    Raises:
        ConfigError: a key that this kind needs is missing or impossible.
        DataError: the file is missing, unreadable, has no end-of-document token or another size than asked for.
    """
    if spec.kind == "bytes":
        from titanyaml.tokenizer.byte import ByteTokenizer

        return ByteTokenizer()
    if spec.kind == "hf":
        from titanyaml.tokenizer.hf import HfTokenizer

        if spec.path is None:
            raise ConfigError(
                "tokenizer=hf needs a file", key="tokenizer.path", hint="tokenizer.path=/path/to/tokenizer.json"
            )
        return HfTokenizer(Path(spec.path).expanduser(), eos_token=spec.eos_token)
    if spec.kind == "sentencepiece":
        return _sentencepiece(spec, corpus, Path(cache_dir), corpus_key)
    raise ConfigError(f"there is no tokenizer {spec.kind!r}", key="tokenizer.kind", hint="tokenizer=bytes")


def _sentencepiece(
    spec: schema.Tokenizer, corpus: Callable[[], Iterator[str]], cache_dir: Path, corpus_key: Callable[[], str] | None
) -> Tokenizer:
    from titanyaml.tokenizer.spm import SentencePieceTokenizer
    from titanyaml.tokenizer.spm_train import trained_model

    if spec.path is None:
        path = trained_model(spec, corpus=corpus, cache_dir=cache_dir, corpus_key=corpus_key)
        return SentencePieceTokenizer(path, eos_token=spec.eos_token)
    tokenizer = SentencePieceTokenizer(Path(spec.path).expanduser(), eos_token=spec.eos_token)
    if spec.vocab_size not in (None, tokenizer.vocab_size):
        raise DataError(
            f"{spec.path} has {tokenizer.vocab_size} tokens, not {spec.vocab_size}",
            key="tokenizer.vocab_size",
            hint=f"tokenizer.vocab_size={tokenizer.vocab_size} or null",
        )
    return tokenizer
