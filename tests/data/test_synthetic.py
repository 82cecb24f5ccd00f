"""Random tokens."""

from __future__ import annotations

import numpy as np
import pytest

from titanyaml.data.synthetic import SyntheticData


def make(seed: int = 0, split: str = "train") -> SyntheticData:
    return SyntheticData(seq_len=256, vocab_size=50, seed=seed, split=split)


def test_tokens_depend_on_seed_split_and_index_only() -> None:
    first = make()[5]
    assert np.array_equal(first.tokens, make()[5].tokens)
    for sample in (make()[6], make(seed=1)[5], make(split="validation")[5]):
        assert not np.array_equal(first.tokens, sample.tokens)
    # written down: no version of numpy may change them
    assert first.tokens[:6].tolist() == [24, 0, 48, 11, 47, 35]


def test_every_label_is_the_next_token() -> None:
    sample = make()[len(make()) - 1]
    assert sample.labels[:-1].tolist() == sample.tokens[1:].tolist()
    assert sample.tokens.min() >= 0 and sample.tokens.max() < 50 and len(set(sample.tokens.tolist())) > 40
    assert not sample.documents.any()
    with pytest.raises(IndexError):
        make()[len(make())]


def test_the_fingerprint_is_all_that_matters() -> None:
    assert make().fingerprint == make().fingerprint
    assert len({make().fingerprint, make(seed=1).fingerprint, make(split="validation").fingerprint}) == 3
