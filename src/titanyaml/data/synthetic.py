"""Random tokens, for benchmarks: no text, no tokenizer, no file."""

from __future__ import annotations

import hashlib

import numpy as np

from titanyaml.data import packing
from titanyaml.data.packing import IndexedData, Sample

_SAMPLES = 1 << 40  # of an epoch: more than anyone reads


class SyntheticData(IndexedData):
    """Uniform tokens from (seed, split, index): never the same sequence twice, so the loss stays at log(vocab_size)."""

    def __init__(self, *, seq_len: int, vocab_size: int, seed: int, split: str) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.num_tokens = _SAMPLES * seq_len
        sizes = {"seq_len": seq_len, "vocab_size": vocab_size}
        self.identity = {"kind": "synthetic", "seed": seed, "split": split} | sizes

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < _SAMPLES:
            raise IndexError(index)
        name = f"{self.identity['seed']}/{self.identity['split']}/{index}"
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
        # random_raw: the raw stream of a bit generator is the part of numpy that never changes
        stream = (np.random.Philox(key=key).random_raw(self.seq_len + 1) % self.vocab_size).astype(np.int64)
        return packing.pack([stream], seq_len=self.seq_len, pad_id=0)
