"""Which documents are held out, and in which order samples come: pure functions of numbers.

The order is a function of (seed, epoch, index) and nothing else. A resumed run computes where it was, on any number of
ranks; there is no generator whose state would have to be saved, and no library whose next version could change it.
"""

import hashlib
import math
from typing import TypeVar

import numpy as np

from titanyaml.errors import DataError

_MASK = (1 << 64) - 1
_HELD_OUT_SALT = 0x7469746E79616D6C  # any constant: held-out documents must not follow from the sample order's hash
_ROUNDS = 8

Integer = TypeVar("Integer", int, np.ndarray)


def mix(x: Integer) -> Integer:
    """A 64-bit hash of a non-negative integer below 2**64, or of each element of a uint64 array."""
    # SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def holdout_hash(index: Integer) -> Integer:
    """Hash of a document's index that decides whether the document is held out."""
    return mix(index ^ _HELD_OUT_SALT)


def holdout_limit(fraction: float) -> int:
    """Documents whose ``holdout_hash`` lies below this are held out."""
    return int(fraction * 2**64)


def split_documents(num_documents: int, fraction: float, split: str) -> np.ndarray:
    """Indices (int64, ascending) of one split's documents; the two splits share none and leave none out."""
    hashes = holdout_hash(np.arange(num_documents, dtype=np.uint64))
    held_out = hashes < holdout_limit(fraction)
    if fraction > 0 and num_documents and not held_out.any():
        held_out[hashes.argmin()] = True  # a small corpus has a validation split too
    indices = np.flatnonzero(held_out if split == "validation" else ~held_out)
    if not len(indices):
        raise empty_split(f"{num_documents} document(s)", fraction, split)
    return indices


def empty_split(documents: str, fraction: float, split: str) -> DataError:
    """The error of a split without a document; ``documents`` names those that there are."""
    hint = "data.validation_fraction=0.02, or validation.batches=0 for no validation"
    if split == "train":
        hint = "data.validation_fraction=0 validation.batches=0"
    message = f"holding out {fraction:g} of {documents} leaves no document for {split}"
    return DataError(message, key="data.validation_fraction", hint=hint)


class Permutation:
    """A pseudo-random permutation of ``range(size)`` in constant memory: ``p[i]`` costs microseconds for any size."""

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        # a generalised Feistel network over a grid just large enough, with cycle walking: Black and Rogaway, "Ciphers
        # with arbitrary finite domains", CT-RSA 2002
        assert size > 0
        self.size = size
        # about square, since a short side would mix badly; fewer than _rows cells of the grid are beyond size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        digest = hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size
        # cycle walking: a cell beyond size is permuted again until it falls inside, which keeps this a permutation
        while True:
            row, column = divmod(index, self._columns)
            for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
                # each line can be undone by subtraction, whatever mix gives: hence a permutation of the grid
                row = (row + mix(even ^ column)) % self._rows
                column = (column + mix(odd ^ row)) % self._columns
            index = row * self._columns + column
            if index < self.size:
                return index
