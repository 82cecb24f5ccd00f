"""Text to batches: sources, the tokenised corpus, packing, the global sample order.

Nothing here but ``loader`` imports torch.
"""

from pathlib import Path

from titanyaml.config import schema
from titanyaml.data import hub
from titanyaml.data.corpus import open_corpus
from titanyaml.data.packing import TokenData
from titanyaml.data.sources import documents, open_source
from titanyaml.data.stream import StreamData
from titanyaml.data.windows import PackedData, SyntheticData
from titanyaml.errors import ConfigError
from titanyaml.tokenizer import Tokenizer
from titanyaml.tokenizer import build as build_from_spec

__all__ = ["build", "build_tokenizer", "documents"]


def build_tokenizer(tokenizer: schema.TokenizerConfig, data: schema.Data) -> Tokenizer:
    """The tokenizer for this data; a vocabulary that is trained sees the training documents only."""

    def corpus_key() -> str:
        source = open_source(data, "train")
        return f"{source.fingerprint}/{source.fraction}"

    return build_from_spec(
        tokenizer, corpus=lambda: documents(data, "train"), cache_dir=Path(data.cache_dir), corpus_key=corpus_key
    )


def build(
    spec: schema.Data, *, tokenizer: Tokenizer | None, seq_len: int, seed: int, split: str, vocab_size: int
) -> TokenData:
    """The samples of one split ("train" or "validation"), tokenised first where the cache does not have them.

    Args:
        tokenizer: None is enough for synthetic tokens. vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: a key is missing or has no meaning for this kind. DataError: files are missing or unreadable, a
            split is empty, or a token id does not fit the model.
    """
    if spec.kind == "synthetic":
        # the only kind whose content depends on the seed; elsewhere it orders samples, which is the loader's work
        return SyntheticData(seq_len=seq_len, vocab_size=vocab_size, seed=seed, split=split)
    assert tokenizer is not None
    if split == "validation" and not spec.validation_fraction and spec.validation_split is None:
        hint = "data.validation_fraction=0.02, or validation.batches=0 for no validation"
        raise ConfigError("nothing is held out for validation", key="data.validation_fraction", hint=hint)
    source = open_source(spec, split)
    sizes = {"seq_len": seq_len, "vocab_size": vocab_size}
    if not spec.streaming:
        cache_dir = Path(spec.cache_dir)
        corpus = open_corpus(source, tokenizer, cache_dir)
        return PackedData(corpus, source, split=split, pad_id=tokenizer.eos_id, cache_dir=cache_dir, **sizes)
    if spec.shuffle:
        message = "a stream is read in its own order (a shuffle buffer is lost on resume)"
        raise ConfigError(message, key="data.shuffle", hint="data.shuffle=false, or data.streaming=false")
    hub_split = source.identity["split"]
    return StreamData(lambda row: hub.rows(spec, hub_split, skip=row), tokenizer, source, split=split, **sizes)
