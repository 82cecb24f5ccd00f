"""From the configuration to data."""

from __future__ import annotations

from pathlib import Path

from titanyaml.config import schema
from titanyaml.data import hub
from titanyaml.data.corpus import open_corpus
from titanyaml.data.packing import TokenData
from titanyaml.data.sources import SPLITS, documents, open_source
from titanyaml.data.stream import StreamData
from titanyaml.data.synthetic import SyntheticData
from titanyaml.data.windows import PackedData
from titanyaml.errors import ConfigError
from titanyaml.tokenizer import Tokenizer
from titanyaml.tokenizer import build as build_from_spec


def build_tokenizer(tokenizer: schema.Tokenizer, data: schema.Data) -> Tokenizer:
    """The tokenizer for this data: a trained vocabulary sees the training documents only.

    Raises:
        ConfigError, DataError: as ``titanyaml.tokenizer.build`` and ``open_source``.
    """
    return build_from_spec(
        tokenizer,
        corpus=lambda: documents(data, "train"),
        cache_dir=Path(data.cache_dir),
        corpus_key=lambda: corpus_key(data),
    )


def corpus_key(spec: schema.Data) -> str:
    """Fingerprint of the documents that ``documents(spec, "train")`` gives."""
    source = open_source(spec, "train")
    return f"{source.fingerprint}/{source.fraction}"


def build(
    spec: schema.Data, *, tokenizer: Tokenizer | None, seq_len: int, seed: int, split: str, vocab_size: int
) -> TokenData:
    """The samples of one split ("train" or "validation"); tokenises the corpus first where the cache has it not.

    ``PackedData`` and ``SyntheticData`` have a length and an index; ``StreamData`` has ``samples(cursor)``. All three
    go into ``data.loader.Batches``.

    Args:
        tokenizer: None is enough for synthetic tokens.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: a key is missing or has no meaning for this kind. DataError: files are missing or unreadable, a
        split is empty, or a token id does not fit the model.
    """
    if spec.kind == "synthetic":
        return SyntheticData(seq_len=seq_len, vocab_size=vocab_size, seed=seed, split=split)
    assert tokenizer is not None
    _check_validation(spec, split)
    source = open_source(spec, split)
    if not spec.streaming:
        cache_dir = Path(spec.cache_dir)
        return PackedData(
            open_corpus(source, tokenizer, cache_dir), source,
            split=split, seq_len=seq_len, vocab_size=vocab_size, pad_id=tokenizer.eos_id, cache_dir=cache_dir,
        )  # fmt: skip
    if spec.shuffle:
        raise ConfigError(
            "a stream is read in its own order (a shuffle buffer is lost on resume)",
            key="data.shuffle", hint="data.shuffle=false, or data.streaming=false",
        )  # fmt: skip
    name = source.identity["split"]
    return StreamData(
        lambda row: hub.rows(spec, name, skip=row), tokenizer,
        what=source.what, identity=source.identity, fraction=source.fraction, split=split,
        seq_len=seq_len, vocab_size=vocab_size,
    )  # fmt: skip


def ensure(spec: schema.Data, *, tokenizer: Tokenizer | None, validation: bool = True) -> None:
    """Make the caches that ``build`` reads, so that ranks only map them: call it in one process first.

    Streams and synthetic tokens have none.

    Raises:
        ConfigError, DataError: as ``build``.
    """
    if spec.kind == "synthetic" or spec.streaming:
        return
    assert tokenizer is not None
    for split in SPLITS if validation and spec.validation_split else SPLITS[:1]:
        open_corpus(open_source(spec, split), tokenizer, Path(spec.cache_dir))


def _check_validation(spec: schema.Data, split: str) -> None:
    if split == "validation" and not spec.validation_fraction and spec.validation_split is None:
        raise ConfigError(
            "nothing is held out for validation", key="data.validation_fraction",
            hint="data.validation_fraction=0.02, or validation.batches=0 for no validation",
        )  # fmt: skip
