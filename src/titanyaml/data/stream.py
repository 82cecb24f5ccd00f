"""A dataset read as a stream in its own order, packed on the fly, resumed exactly."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from titanyaml.data import packing
from titanyaml.data.files import Document
from titanyaml.data.order import empty_split, holdout_hash, holdout_limit
from titanyaml.data.packing import Sample, TokenData
from titanyaml.data.sources import Source
from titanyaml.tokenizer import Tokenizer

#: The documents of a dataset from a row on.
RowReader = Callable[[int], Iterator[Document]]


class Cursor(NamedTuple):
    """Where the next sample begins: pass over the dataset, row in it, token in the row's document."""

    epoch: int = 0
    row: int = 0
    token: int = 0


class _DocumentTail(NamedTuple):
    """The ids of a row's document from ``token`` on."""

    row: int
    token: int
    ids: np.ndarray


class StreamData(TokenData):
    """Windows over a stream, packed as in ``PackedData``, in the order of its rows."""

    def __init__(
        self, rows: RowReader, tokenizer: Tokenizer, source: Source, *, split: str, seq_len: int, vocab_size: int
    ) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self._rows, self._tokenizer, self._source, self._split = rows, tokenizer, source, split
        self._first: list[Sample] = []
        # no shuffle buffer: its content would be lost on resume
        own = {"tokenizer": tokenizer.fingerprint, "split": split, "validation_fraction": source.fraction}
        self.identity = source.identity | own | {"seq_len": seq_len}

    def samples(self, cursor: Cursor) -> Iterator[tuple[Sample, Cursor]]:
        """Samples from ``cursor`` on without end, each with the cursor of the next one."""
        while True:
            is_empty = True
            for sample, after in self._epoch(cursor):
                is_empty = False
                yield sample, after
            if is_empty and cursor.row == 0:  # a cursor at the very end has nothing left of its epoch
                raise empty_split(self._source.title, self._source.fraction or 0.0, self._split)
            cursor = Cursor(cursor.epoch + 1)

    def first(self, count: int) -> list[Sample]:
        """The first samples, at most one epoch's; kept, because every validation reads the same ones."""
        if len(self._first) < count:
            self._first = [sample for sample, _ in itertools.islice(self._epoch(Cursor()), count)]
        return self._first[:count]

    def _epoch(self, cursor: Cursor) -> Iterator[tuple[Sample, Cursor]]:
        pieces: list[_DocumentTail] = []
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

    def _pieces(self, cursor: Cursor) -> Iterator[_DocumentTail]:
        """Tokenised documents of this split; the first starts within its document, where the cursor says."""
        fraction = self._source.fraction
        limit = holdout_limit(fraction or 0.0)
        # held out by the row's own number, empty rows included; a stream too short for the fraction holds out none,
        # since nobody knows in advance where it ends
        for row, document in enumerate(self._rows(cursor.row), cursor.row):
            is_elsewhere = fraction is not None and (holdout_hash(row) < limit) != (self._split == "validation")
            if is_elsewhere or not document.text:
                continue
            ids = np.array([*self._tokenizer.encode(document.text), self._tokenizer.eos_id], dtype=np.int64)
            packing.check_ids(ids, self.vocab_size, document.name)
            token = cursor.token if row == cursor.row else 0
            yield _DocumentTail(row, token, ids[token:])


def _cut(pieces: list[_DocumentTail], seq_len: int) -> tuple[list[np.ndarray], list[_DocumentTail]]:
    """The window of the first S+1 tokens, and the pieces without the S tokens that it consumes."""
    window: list[np.ndarray] = []
    missing = seq_len + 1
    while missing:
        piece = pieces[len(window)]
        window.append(piece.ids[:missing])
        missing -= len(window[-1])
    # the window's last token is the first of the next one, where it is an input: it stays
    used = len(window[-1]) - 1
    tail = _DocumentTail(piece.row, piece.token + used, piece.ids[used:])
    return window, [tail, *pieces[len(window) :]]
