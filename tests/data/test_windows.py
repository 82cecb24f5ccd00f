"""Windows over one split of a corpus, and random tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titanyaml import data
from titanyaml.data.order import split_documents
from titanyaml.data.packing import IGNORED
from titanyaml.data.windows import SyntheticData
from titanyaml.errors import DataError
from titanyaml.tokenizer import ByteTokenizer


def stream_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in [*text.encode(), 257]]


@pytest.mark.parametrize("seq_len", [1, 3, 16, 64, 100_000])
@pytest.mark.parametrize(("fraction", "split"), [(0.0, "train"), (0.2, "train"), (0.2, "validation")])
def test_every_token_but_the_first_is_a_label_once(
    packed: Callable, texts: list[str], seq_len: int, fraction: float, split: str
) -> None:
    dataset = packed(seq_len=seq_len, validation_fraction=fraction, split=split)
    expected = stream_of([texts[index] for index in split_documents(len(texts), fraction, split)])
    samples = [dataset[index] for index in range(len(dataset))]
    labels = np.concatenate([sample.labels for sample in samples])
    assert labels[labels != IGNORED].tolist() == expected[1:]
    tokens = np.concatenate([sample.tokens for sample in samples])[: len(expected)]
    assert tokens.tolist() == expected[: len(tokens)]
    assert dataset.num_tokens == len(expected)
    assert all(len(part) == seq_len for sample in samples for part in sample)


def test_the_splits_share_no_document(packed: Callable, texts: list[str]) -> None:
    def documents(split: str) -> set[str]:
        dataset = packed(seq_len=100_000, validation_fraction=0.2, split=split)
        tokens, labels, _ = dataset[0]
        stream = [*tokens[: dataset.num_tokens - 1].tolist(), int(labels[dataset.num_tokens - 2])]
        return set(ByteTokenizer().decode([10 if token == 257 else token for token in stream]).splitlines())

    train, validation = documents("train"), documents("validation")
    assert not train & validation and train | validation == set(texts) and validation


def test_documents_change_after_each_end(packed: Callable) -> None:
    dataset = packed(seq_len=64)
    for index in range(len(dataset) - 1):
        sample = dataset[index]
        ends = np.cumsum(sample.tokens == 257)
        assert sample.documents.tolist() == [0, *ends[:-1].tolist()]


def test_indices_outside_are_refused(packed: Callable) -> None:
    dataset = packed()
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[index]


def test_the_identity_is_what_decides_the_samples(packed: Callable) -> None:
    first = packed(seq_len=16)
    assert packed(seq_len=16).fingerprint == first.fingerprint
    assert packed(seq_len=8).fingerprint != first.fingerprint
    assert packed(seq_len=16, validation_fraction=0.1).fingerprint != first.fingerprint


def test_ids_that_do_not_fit_the_model_are_refused_at_the_start(write_lines: Callable, files_spec: Callable) -> None:
    spec = files_spec(write_lines(["ab", "cd"]))
    with pytest.raises(DataError, match="corpus.jsonl:1: token id 257 is outside the model's vocabulary of 257"):
        data.build(spec, tokenizer=ByteTokenizer(), seq_len=4, seed=0, split="train", vocab_size=257)


def test_a_damaged_id_is_refused_when_it_comes(packed: Callable, tmp_path: Path) -> None:
    packed(seq_len=16)
    (file,) = (tmp_path / "cache" / "corpora").glob("*/tokens.bin")
    content = bytearray(file.read_bytes())
    content[2 * 40 : 2 * 41] = b"\xff\xff"
    file.write_bytes(content)
    dataset = packed(seq_len=16)
    assert dataset[0].tokens.max() <= 257
    with pytest.raises(DataError, match=r"documents \d+ to \d+: token id 65535 is outside"):
        dataset[2]


def random_tokens(seed: int = 0, split: str = "train") -> SyntheticData:
    return SyntheticData(seq_len=256, vocab_size=50, seed=seed, split=split)


def test_random_tokens_depend_on_seed_split_and_index_only() -> None:
    first = random_tokens()[5]
    assert np.array_equal(first.tokens, random_tokens()[5].tokens)
    for sample in (random_tokens()[6], random_tokens(seed=1)[5], random_tokens(split="validation")[5]):
        assert not np.array_equal(first.tokens, sample.tokens)
    # written down: no version of numpy may change them
    assert first.tokens[:6].tolist() == [24, 0, 48, 11, 47, 35]


def test_every_label_is_the_next_random_token() -> None:
    sample = random_tokens()[len(random_tokens()) - 1]
    assert sample.labels[:-1].tolist() == sample.tokens[1:].tolist()
    assert sample.tokens.min() >= 0 and sample.tokens.max() < 50 and len(set(sample.tokens.tolist())) > 40
    assert not sample.documents.any()
    with pytest.raises(IndexError):
        random_tokens()[len(random_tokens())]


def test_the_fingerprint_of_random_tokens_follows_seed_and_split() -> None:
    assert random_tokens().fingerprint == random_tokens().fingerprint
    assert (
        len(
            {
                random_tokens().fingerprint,
                random_tokens(seed=1).fingerprint,
                random_tokens(split="validation").fingerprint,
            }
        )
        == 3
    )
