"""Held-out documents and permutations."""

from __future__ import annotations

import numpy as np
import pytest

from titanyaml.data.order import Permutation, holdout_hash, mix, split_documents
from titanyaml.errors import DataError


def test_mix_is_splitmix64_for_numbers_and_arrays() -> None:
    # the first outputs of the published generator with state 0
    states = [0, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A]
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix(state) for state in states] == expected
    assert mix(np.array(states, dtype=np.uint64)).tolist() == expected
    assert holdout_hash(np.arange(9, dtype=np.uint64)).tolist() == [holdout_hash(index) for index in range(9)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 1024, 1025])
def test_a_permutation_has_every_index_once(size: int) -> None:
    for epoch in range(3):
        permutation = Permutation(size, seed=7, epoch=epoch)
        assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_a_permutation_depends_on_seed_and_epoch_and_never_changes() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        permutation = Permutation(1000, seed=seed, epoch=epoch)
        return [permutation[index] for index in range(6)]

    assert first(0, 0) != first(0, 1) != first(1, 0) != first(0, 0)
    # written down: another version of this code, of numpy or of Python must give the same order
    assert first(0, 0) == [523, 187, 48, 631, 467, 843]


def test_a_permutation_is_uniform_enough() -> None:
    size, trials = 8, 4000
    counts = np.zeros((size, size))
    for seed in range(trials):
        permutation = Permutation(size, seed=seed, epoch=0)
        for index in range(size):
            counts[index, permutation[index]] += 1
    expected = trials / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 100  # 49 degrees of freedom: 85 at p = 0.001
    large = Permutation(100_000, seed=0, epoch=0)
    order = np.array([large[index] for index in range(5000)])
    assert abs(np.corrcoef(np.arange(5000), order)[0, 1]) < 0.05
    assert abs(order.mean() / 100_000 - 0.5) < 0.02


def test_a_huge_permutation_costs_no_memory() -> None:
    permutation = Permutation(10**15, seed=0, epoch=0)
    assert len({permutation[index] for index in range(100)}) == 100


def test_splits_share_nothing_and_lose_nothing() -> None:
    train, validation = (split_documents(10_000, 0.1, split) for split in ("train", "validation"))
    assert sorted([*train, *validation]) == list(range(10_000))
    assert 850 < len(validation) < 1150
    more = split_documents(20_000, 0.1, "validation")
    assert np.array_equal(more[more < 10_000], validation)  # new documents move no old one


def test_a_small_corpus_still_holds_one_document_out() -> None:
    assert len(split_documents(3, 0.001, "validation")) == 1
    assert len(split_documents(3, 0.001, "train")) == 2
    assert len(split_documents(3, 0.0, "train")) == 3


@pytest.mark.parametrize(("number", "fraction", "split"), [(1, 0.1, "train"), (5, 0.0, "validation")])
def test_an_empty_split_is_an_error(number: int, fraction: float, split: str) -> None:
    with pytest.raises(DataError, match=f"leaves no document for {split}") as caught:
        split_documents(number, fraction, split)
    assert caught.value.key == "data.validation_fraction"
