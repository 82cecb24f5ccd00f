"""Documents to windows of equal length: concatenated, then cut; no token is dropped or repeated."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from titanyaml.errors import DataError

IGNORED = -100  # torch.nn.functional.cross_entropy's default ignore_index


class Sample(NamedTuple):
    """One training sequence; all int64 [S].

    ``labels`` is the token that follows, -100 where there is none. ``documents`` counts the documents of the window
    from 0; padding is a document of its own.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray


class TokenData:
    """Base of the samples of one split.

    Attributes:
        seq_len: S. vocab_size: of the model; every id is below it.
        identity: JSON-able; equal identities mean equal samples in equal order.
    """

    seq_len: int
    vocab_size: int
    identity: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]


class IndexedData(TokenData):
    """Samples that can be read in any order; ``num_tokens``: real tokens of an epoch."""

    num_tokens: int

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        raise NotImplementedError


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Windows in which each of ``num_tokens`` tokens but the first is a label exactly once."""
    return -(-max(num_tokens - 1, 0) // seq_len)


def pack(pieces: Sequence[np.ndarray], *, seq_len: int, pad_id: int) -> Sample:
    """A sample of at most S+1 tokens, each piece from another document; fewer are padded with ``pad_id``."""
    size = sum(map(len, pieces))
    assert 2 <= size <= seq_len + 1  # one token alone has no label
    stream = np.full(seq_len + 1, pad_id, dtype=np.int64)
    documents = np.full(seq_len + 1, len(pieces), dtype=np.int64)
    end = 0
    for number, piece in enumerate(pieces):
        stream[end : end + len(piece)] = piece
        documents[end : end + len(piece)] = number
        end += len(piece)
    labels = stream[1:].copy()
    labels[size - 1 :] = IGNORED  # padding, and the token before it, which nothing follows
    # copies: a view would keep its longer array alive while the sample waits in the queue
    return Sample(stream[:-1].copy(), labels, documents[:-1].copy())


def check_ids(ids: np.ndarray, vocab_size: int, document: str) -> None:
    """Refuse ids that the model has no row for: on a GPU they abort, sharded they give finite garbage."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise vocabulary_error(int(bad), vocab_size, document)


def vocabulary_error(token_id: int, vocab_size: int, document: str) -> DataError:
    message = f"{document}: token id {token_id} is outside the model's vocabulary of {vocab_size}"
    hint = f"model.vocab_size={token_id + 1} or more, or the tokenizer the model was made for"
    return DataError(message, key="model.vocab_size", hint=hint)
