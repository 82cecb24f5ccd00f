"""Batches of a rank."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.data.conftest import Numbers
from titanyaml.data.loader import Batch, Batches, accumulation, validation_batches
from titanyaml.data.packing import IGNORED
from titanyaml.errors import ConfigError, DataError

SIZES = {"seed": 3, "global_batch": 8, "local_batch": 8, "data_rank": 0, "data_degree": 1}


def steps(dataset, count: int, **keys: object) -> list[list[Batch]]:
    with Batches(dataset, **(SIZES | keys)) as batches:
        return list(itertools.islice(batches, count))


def rows(step: list[Batch]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [
        (int(i), tuple(tokens.tolist()), tuple(labels.tolist()))
        for batch in step
        for i, tokens, labels in zip(batch.sample_ids, batch.tokens_BS, batch.labels_BS, strict=True)
    ]


def ids(run: list[list[Batch]]) -> list[list[int]]:
    return [[row[0] for row in rows(step)] for step in run]


@pytest.mark.parametrize("source", ["windows", "stream"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("local", [1, 2])
def test_the_mesh_changes_nothing(packed: Callable, stream: Callable, source: str, degree: int, local: int) -> None:
    dataset = packed() if source == "windows" else stream()
    alone = steps(dataset, 20)
    ranks = [steps(dataset, 20, data_rank=rank, data_degree=degree, local_batch=local) for rank in range(degree)]
    for number, step in enumerate(alone):
        assert [len(run[number]) for run in ranks] == [8 // (degree * local)] * degree
        together = [row for forward in zip(*(run[number] for run in ranks), strict=True) for row in rows(list(forward))]
        assert together == rows(step)


@pytest.mark.parametrize("source", ["windows", "stream"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_resume_at_any_step_equals_the_uninterrupted_run(
    packed: Callable, stream: Callable, source: str, prefetch: int
) -> None:
    dataset = packed() if source == "windows" else stream()
    total = 26  # 87 samples an epoch: two and a half epochs of steps that straddle their ends
    uninterrupted = [rows(step) for step in steps(dataset, total)]
    for stop in range(0, total, 3):
        with Batches(dataset, **SIZES, prefetch=prefetch) as batches:
            for _ in range(stop):
                next(batches)
            assert batches.position == 8 * stop
            saved = json.loads(json.dumps(batches.state()))
        resumed = steps(dataset, total - stop, state=saved, data_degree=1, prefetch=prefetch)
        assert [rows(step) for step in resumed] == uninterrupted[stop:]


def test_resume_on_another_mesh(packed: Callable) -> None:
    dataset = packed()
    uninterrupted = ids(steps(dataset, 10))
    with Batches(dataset, **SIZES) as batches:
        for _ in range(4):
            next(batches)
        state = batches.state()
    parts = [ids(steps(dataset, 6, state=state, data_rank=r, data_degree=2, local_batch=4)) for r in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == uninterrupted[4:]


def test_a_position_alone_is_enough(packed: Callable, stream: Callable, caplog) -> None:
    for dataset in (packed(), stream()):
        assert ids(steps(dataset, 3, position=40)) == ids(steps(dataset, 8))[5:]
    assert "reading 40 samples of the stream again" in caplog.text


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_an_epoch(shuffle: bool) -> None:
    run = ids(steps(Numbers(37), 37, shuffle=shuffle))
    order = list(itertools.chain(*run))
    epochs = [order[start : start + 37] for start in range(0, len(order), 37)]
    assert len(epochs) == 8
    for epoch in epochs:
        assert sorted(epoch) == list(range(37))
    assert (epochs[0] == list(range(37))) == (not shuffle)
    assert (epochs[0] == epochs[1]) == (not shuffle)


def test_every_token_is_a_label_once_an_epoch(packed: Callable) -> None:
    dataset = packed()
    batches = steps(dataset, len(dataset), global_batch=1, local_batch=1)
    labels = torch.cat([step[0].labels_BS.flatten() for step in batches])
    all_labels = torch.cat([torch.from_numpy(dataset[i].labels) for i in range(len(dataset))])
    assert int((labels != IGNORED).sum()) == dataset.num_tokens - 1
    assert Counter(labels.tolist()) == Counter(all_labels.tolist())


def test_the_seed_changes_the_order() -> None:
    assert ids(steps(Numbers(37), 2)) != ids(steps(Numbers(37), 2, seed=4))


def test_tensors_are_as_promised(packed: Callable) -> None:
    (batch,) = steps(packed(), 1)[0]
    for part in (batch.tokens_BS, batch.labels_BS, batch.documents_BS):
        assert part.dtype == torch.int64 and part.shape == (8, 16)
    assert batch.sample_ids.dtype == torch.int64 and batch.sample_ids.shape == (8,)
    assert torch.equal(batch.tokens_BS[:, 1:], batch.labels_BS[:, :-1])


def test_fewer_samples_than_a_step_wrap_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "titanyaml"):
        run = [ids(steps(Numbers(3), 3, data_rank=rank, data_degree=2, local_batch=2)) for rank in range(2)]
    counts = Counter(itertools.chain(*itertools.chain(*run)))
    assert counts == {0: 8, 1: 8, 2: 8}
    assert caplog.text.count("fewer than a step's 8") == 1


def test_position_and_epoch_count_what_was_handed_out(stream: Callable) -> None:
    with Batches(Numbers(16), **SIZES, prefetch=3) as batches:
        assert (batches.position, batches.epoch) == (0, 0)
        next(batches)
        assert (batches.position, batches.epoch) == (8, 0)
        next(batches)
        assert (batches.position, batches.epoch) == (16, 1)
    with Batches(stream(seq_len=64), **SIZES) as batches:
        assert batches.epoch == 0
        for _ in range(8):
            next(batches)
        assert batches.epoch == batches.position // len(stream(seq_len=64).first(1000)) > 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_data_surfaces_in_the_consumer(prefetch: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int):
            if index == 20:
                raise DataError("row 20 is broken")
            return super().__getitem__(index)

    with Batches(Broken(40), **SIZES, shuffle=False, prefetch=prefetch) as batches:
        next(batches)
        next(batches)
        with pytest.raises(DataError, match="row 20 is broken"):
            next(batches)
        assert batches.position == 16


def test_a_forgotten_loader_stops_its_thread() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "titanyaml-data"]

    before = threads()
    batches = Batches(Numbers(40), **SIZES)
    next(batches)
    (thread,) = [thread for thread in threads() if thread not in before]
    del batches
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_batch_sizes_that_do_not_fit_are_refused() -> None:
    assert accumulation(global_batch=24, local_batch=2, data_degree=3) == 4
    with pytest.raises(ConfigError, match="10 is no multiple of .* 2 \\* 3") as caught:
        Batches(Numbers(9), seed=0, global_batch=10, local_batch=2, data_rank=0, data_degree=3)
    assert "train.global_batch=12" in str(caught.value)


def test_a_state_of_other_data_is_refused_naming_what_changed(write_lines: Callable, packed: Callable) -> None:
    with Batches(packed(), **SIZES) as batches:
        state = batches.state()
    for keys, message in (({"seed": 9}, "seed: 3 then, 9 now"), ({"shuffle": False}, "shuffle: True then, False now")):
        with pytest.raises(DataError, match=message):
            Batches(packed(), **(SIZES | keys), state=state)
    with pytest.raises(DataError, match="seq_len: 16 then, 8 now"):
        Batches(packed(seq_len=8), **SIZES, state=state)


def test_a_changed_file_is_named(write_lines: Callable, files_spec: Callable) -> None:
    from titanyaml import data
    from titanyaml.tokenizer import ByteTokenizer

    def build():
        spec = files_spec(write_lines(["same" * 20], "a.jsonl"), path)
        return data.build(spec, tokenizer=ByteTokenizer(), seq_len=8, seed=0, split="train", vocab_size=258)

    path = write_lines(["before" * 9], "b.jsonl")
    with Batches(build(), **SIZES) as batches:
        state = batches.state()
    write_lines(["after" * 9], "b.jsonl")
    with pytest.raises(DataError, match="changed b.jsonl") as caught:
        Batches(build(), **SIZES, state=state)
    assert "a.jsonl" not in str(caught.value)


def validation(dataset, *, batches: int, **keys: object) -> list[list[Batch]]:
    sizes = {"global_batch": 8, "local_batch": 2, "data_rank": 0, "data_degree": 1} | keys
    return list(validation_batches(dataset, batches=batches, **sizes))


@pytest.mark.parametrize("source", ["windows", "stream"])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("batches", [1, 3, 1000])
def test_validation_counts_each_label_once_with_equal_forwards(
    packed: Callable, stream: Callable, source: str, degree: int, batches: int
) -> None:
    # 82 windows: the last step of 8 has only two
    dataset = packed(seq_len=17) if source == "windows" else stream(seq_len=17)
    windows = packed(seq_len=17)
    runs = [validation(dataset, batches=batches, data_rank=rank, data_degree=degree) for rank in range(degree)]
    assert len({tuple(len(step) for step in run) for run in runs}) == 1
    assert {batch.tokens_BS.shape for run in runs for step in run for batch in step} == {(2, 17)}
    all_rows = [row for run in runs for step in run for row in rows(step)]
    real = sorted(row for row in all_rows if row[0] >= 0)
    assert [row[0] for row in real] == list(range(min(8 * batches, len(windows))))
    for index, tokens, labels in real:
        assert tokens == tuple(windows[index].tokens) and labels == tuple(windows[index].labels)
    padding = [row for row in all_rows if row[0] < 0]
    assert all(set(labels) == {IGNORED} for _, _, labels in padding)
    assert len(padding) < 2 * degree  # no forward in which every rank only pads


def test_validation_is_the_same_every_time(packed: Callable) -> None:
    dataset = packed(split="validation", validation_fraction=0.3)
    assert ids(validation(dataset, batches=2)) == ids(validation(dataset, batches=2))
