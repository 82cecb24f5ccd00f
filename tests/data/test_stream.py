"""Data read as a stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from titanyaml.data.stream import Cursor
from titanyaml.errors import DataError


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seq_len", [1, 3, 16, 64, 2000])
@pytest.mark.parametrize(("fraction", "split"), [(0.0, "train"), (0.2, "train"), (0.2, "validation")])
def test_a_stream_gives_the_windows_of_the_corpus(
    stream: Callable, packed: Callable, seq_len: int, fraction: float, split: str
) -> None:
    corpus = packed(seq_len=seq_len, validation_fraction=fraction, split=split)
    streamed = stream(seq_len=seq_len, fraction=fraction, split=split)
    two_epochs = list(itertools.islice(streamed.samples(Cursor()), 2 * len(corpus)))
    for number, (sample, after) in enumerate(two_epochs):
        assert same(sample, corpus[number % len(corpus)])
        assert after.epoch in (number // len(corpus), (number + 1) // len(corpus))


@pytest.mark.parametrize("seq_len", [1, 7, 64])
@pytest.mark.parametrize("fraction", [None, 0.2])
def test_every_cursor_goes_on_exactly(stream: Callable, seq_len: int, fraction: float | None) -> None:
    streamed = stream(seq_len=seq_len, fraction=fraction)
    count = 60 if seq_len < 64 else 45
    uninterrupted = list(itertools.islice(streamed.samples(Cursor()), count))
    for number in range(0, count - 3, 1 if seq_len == 64 else 5):
        cursor = Cursor(*list(uninterrupted[number][1]))
        stream.opened.clear()
        for offset, (sample, after) in enumerate(itertools.islice(streamed.samples(cursor), 3)):
            assert (
                same(sample, uninterrupted[number + 1 + offset][0]) and after == uninterrupted[number + 1 + offset][1]
            )
        assert stream.opened[0] == cursor.row  # rows before it are not read


def test_the_first_samples_are_read_once_and_end_with_the_epoch(stream: Callable, packed: Callable) -> None:
    streamed, corpus = stream(), packed()
    assert len(streamed.first(3)) == 3
    assert len(streamed.first(10_000)) == len(corpus)
    reads = len(stream.opened)
    assert same(streamed.first(2)[1], corpus[1])
    assert len(stream.opened) == reads


def test_an_id_that_does_not_fit_the_model_names_its_row(stream: Callable) -> None:
    with pytest.raises(DataError, match="row 0: token id 257 is outside the model's vocabulary of 257"):
        next(stream(vocab_size=257).samples(Cursor()))


def test_an_empty_stream_is_an_error(stream: Callable) -> None:
    for empty in (stream(texts=[]), stream(texts=["", ""]), stream(texts=["a"], fraction=0.0, split="validation")):
        with pytest.raises(DataError, match="leaves no document"):
            next(empty.samples(Cursor()))
