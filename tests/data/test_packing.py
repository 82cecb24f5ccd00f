"""Packing documents into a window."""

from __future__ import annotations

import numpy as np
import pytest

from titanyaml.data.packing import IGNORED, check_ids, num_windows, pack
from titanyaml.errors import DataError


def test_pack_shifts_labels_and_counts_documents() -> None:
    sample = pack([np.array([1, 2]), np.array([3]), np.array([4, 5])], seq_len=4, pad_id=0)
    assert sample.tokens.tolist() == [1, 2, 3, 4]
    assert sample.labels.tolist() == [2, 3, 4, 5]
    assert sample.documents.tolist() == [0, 0, 1, 2]
    assert {part.dtype for part in sample} == {np.dtype(np.int64)}


def test_padding_is_ignored_and_a_document_of_its_own() -> None:
    sample = pack([np.array([1, 2], dtype=np.uint16), np.array([3], dtype=np.uint16)], seq_len=6, pad_id=9)
    assert sample.tokens.tolist() == [1, 2, 3, 9, 9, 9]
    assert sample.labels.tolist() == [2, 3, IGNORED, IGNORED, IGNORED, IGNORED]
    assert sample.documents.tolist() == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize(("tokens", "windows"), [(0, 0), (1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_num_windows(tokens: int, windows: int) -> None:
    assert num_windows(tokens, 4) == windows


@pytest.mark.parametrize("bad", [-1, 100, 1000])
def test_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    check_ids(np.array([0, 99]), 100, "file.txt")
    check_ids(np.array([], dtype=np.int64), 100, "file.txt")
    with pytest.raises(DataError, match=f"file.txt: token id {bad} is outside the model's vocabulary of 100"):
        check_ids(np.array([0, bad, 5]), 100, "file.txt")
