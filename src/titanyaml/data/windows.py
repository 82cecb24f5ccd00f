"""Samples in any order: windows over a split of a tokenised corpus, found in logarithmic time; or random tokens."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from titanyaml.data import packing
from titanyaml.data.corpus import Corpus, manifest
from titanyaml.data.order import split_documents
from titanyaml.data.packing import IndexedData, Sample
from titanyaml.data.sources import Source, difference

_SYNTHETIC_SAMPLES = 1 << 40  # of an epoch: more than anyone reads


class PackedData(IndexedData):
    """Windows of S tokens over the concatenated documents of a split; window i starts at token i*S.

    Every token but the first is a label exactly once an epoch; the last window is padded.
    """

    def __init__(
        self, corpus: Corpus, source: Source, *, split: str, seq_len: int, vocab_size: int, pad_id: int, cache_dir: Path
    ) -> None:
        if corpus.max_id >= vocab_size:
            raise packing.vocabulary_error(corpus.max_id, vocab_size, corpus.max_id_document)
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self._tokens, self._pad_id, self._cache_dir, self._title = corpus.tokens, pad_id, cache_dir, source.title
        bounds, count, fraction = np.asarray(corpus.bounds), len(corpus.bounds) - 1, source.fraction
        self._indices = np.arange(count) if fraction is None else split_documents(count, fraction, split)
        # documents of the split are not contiguous in the file: starts count its tokens, ends those of the split
        self._starts = bounds[self._indices]
        self._ends = np.cumsum(bounds[self._indices + 1] - self._starts)
        self.num_tokens = int(self._ends[-1])
        assert self.num_tokens > 1  # a document is at least one token and its end
        self.identity = {"corpus": corpus.key, "split": split, "validation_fraction": fraction, "seq_len": seq_len}

    def __len__(self) -> int:
        return packing.num_windows(self.num_tokens, self.seq_len)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.seq_len
        # one token more than S: it is the label of the last one
        end = min(start + self.seq_len + 1, self.num_tokens)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        pieces = [self._piece(document, start, end) for document in range(first, last + 1)]
        sample = packing.pack(pieces, seq_len=self.seq_len, pad_id=self._pad_id)
        documents = f"{self._title}, documents {self._indices[first]} to {self._indices[last]}"
        packing.check_ids(sample.tokens, self.vocab_size, documents)
        return sample

    def explain(self, old: dict[str, Any]) -> list[str]:
        """What differs between the files of this corpus and those of another identity, as far as the cache knows."""
        before = manifest(self._cache_dir, old.get("corpus", ""))
        after = manifest(self._cache_dir, self.identity["corpus"])
        return difference(before, after) if before and after else []

    def _piece(self, document: int, start: int, end: int) -> np.ndarray:
        """The part of a document (counted within the split) between two tokens of the split."""
        begin = int(self._ends[document - 1]) if document else 0
        shift = int(self._starts[document]) - begin  # from tokens of the split to tokens of the file
        return self._tokens[max(start, begin) + shift : min(end, int(self._ends[document])) + shift]


class SyntheticData(IndexedData):
    """Uniform tokens from (seed, split, index), for benchmarks: no text, no tokenizer, no file.

    Never the same sequence twice, so the loss stays at log(vocab_size).
    """

    def __init__(self, *, seq_len: int, vocab_size: int, seed: int, split: str) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.num_tokens = _SYNTHETIC_SAMPLES * seq_len
        sizes = {"seq_len": seq_len, "vocab_size": vocab_size}
        self.identity = {"kind": "synthetic", "seed": seed, "split": split} | sizes

    def __len__(self) -> int:
        return _SYNTHETIC_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < _SYNTHETIC_SAMPLES:
            raise IndexError(index)
        name = f"{self.identity['seed']}/{self.identity['split']}/{index}"
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
        # random_raw: the raw stream of a bit generator is the part of numpy that never changes
        stream = (np.random.Philox(key=key).random_raw(self.seq_len + 1) % self.vocab_size).astype(np.int64)
        return packing.pack([stream], seq_len=self.seq_len, pad_id=0)
