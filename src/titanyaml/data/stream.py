"""A dataset read as a stream in its own order, packed on the fly, resumed exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from titanyaml.data import packing
from titanyaml.data.files import Document
from titanyaml.data.order import empty_split, holdout_hash, holdout_limit
from titanyaml.data.packing import Sample
from titanyaml.tokenizer import Tokenizer


class Cursor(NamedTuple):
    """Where the next sample begins: pass over the dataset, row in it, token in the row's document."""

    epoch: int = 0
    row: int = 0
    token: int = 0


class _Piece(NamedTuple):
    row: int
    token: int
    ids: np.ndarray


class StreamData:
    """Windows over a stream, packed as in ``PackedData``, in the order of its rows.

    There is no shuffle buffer, because what is in one is lost on resume. Rows are held out by their own number, empty
    ones included, and a stream too short for the fraction holds out none. Attributes as in ``packing.TokenData``.

    Args:
        rows: documents from a row on, in an order that never changes.
        fraction: share of rows held out for validation; None: the stream is one split by itself.
        identity: of the stream; the rest is added here.
    """

    def __init__(
        self,
        rows: Callable[[int], Iterator[Document]],
        tokenizer: Tokenizer,
        *,
        what: str,
        identity: dict,
        fraction: float | None,
        split: str,
        seq_len: int,
        vocab_size: int,
    ) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self._rows, self._tokenizer, self._what = rows, tokenizer, what
        self._fraction, self._split = fraction, split
        self._first: list[Sample] = []
        self.identity = identity | {
            "tokenizer": tokenizer.fingerprint, "split": split, "validation_fraction": fraction, "seq_len": seq_len
        }  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """Hash of the identity."""
        return packing.fingerprint(self.identity)

    def samples(self, cursor: Cursor) -> Iterator[tuple[Sample, Cursor]]:
        """Samples from ``cursor`` on without end, each with the cursor of the one after it.

        Raises:
            DataError: reading failed, an id does not fit the model, or the split has no document.
        """
        while True:
            given = False
            for sample, after in self._epoch(cursor):
                given = True
                yield sample, after
            if not given and cursor.row == 0:
                raise empty_split(self._what, self._fraction or 0.0, self._split)
            cursor = Cursor(cursor.epoch + 1)

    def first(self, count: int) -> list[Sample]:
        """The first samples, at most one epoch's; read once and kept."""
        if len(self._first) < count:
            self._first = [sample for sample, _ in itertools.islice(self._epoch(Cursor()), count)]
        return self._first[:count]

    def _epoch(self, cursor: Cursor) -> Iterator[tuple[Sample, Cursor]]:
        pieces: list[_Piece] = []
        size = 0
        for piece in self._pieces(cursor):
            pieces.append(piece)
            size += len(piece.ids)
            while size > self.seq_len:
                window, pieces = _cut(pieces, self.seq_len)
                size -= self.seq_len
                yield self._pack(window), Cursor(cursor.epoch, pieces[0].row, pieces[0].token)
        if size > 1:
            yield self._pack([piece.ids for piece in pieces]), Cursor(cursor.epoch + 1)

    def _pack(self, window: list[np.ndarray]) -> Sample:
        return packing.pack(window, seq_len=self.seq_len, pad_id=self._tokenizer.eos_id)

    def _pieces(self, cursor: Cursor) -> Iterator[_Piece]:
        """Tokenised documents of this split; the first starts within its document, where the cursor says."""
        limit = holdout_limit(self._fraction) if self._fraction is not None else 0
        for row, document in enumerate(self._rows(cursor.row), cursor.row):
            held_out = self._fraction is not None and holdout_hash(row) < limit
            mine = self._fraction is None or held_out == (self._split == "validation")
            if not mine or not document.text:
                continue
            ids = np.array([*self._tokenizer.encode(document.text), self._tokenizer.eos_id], dtype=np.int64)
            packing.check_ids(ids, self.vocab_size, document.name)
            token = cursor.token if row == cursor.row else 0
            yield _Piece(row, token, ids[token:])


def _cut(pieces: list[_Piece], seq_len: int) -> tuple[list[np.ndarray], list[_Piece]]:
    """The window of the first S+1 tokens, and what is left when S of them are consumed."""
    window, wanted = [], seq_len + 1
    while wanted:
        piece = pieces[len(window)]
        window.append(piece.ids[:wanted])
        wanted -= len(window[-1])
    # the window's last token is the first of the next one: it stays
    used = len(window[-1]) - 1
    rest = _Piece(piece.row, piece.token + used, piece.ids[used:])
    return window, [rest, *pieces[len(window) :]]
