"""Samples to the batches of one rank, in an order that no mesh, thread or restart changes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from titanyaml.data.order import Permutation
from titanyaml.data.packing import IGNORED, IndexedData, Sample, TokenData
from titanyaml.data.prefetch import Prefetcher
from titanyaml.data.stream import Cursor, StreamData
from titanyaml.errors import ConfigError, DataError

log = logging.getLogger("titanyaml.data")

#: (sample id, sample) of each row of a step that this rank reads.
Rows = list[tuple[int, Sample]]


@dataclass(frozen=True)
class Batch:
    """One forward of one data rank: int64 CPU tensors.

    ``labels_BS`` is the next token, -100 where ignored; ``documents_BS`` the document within the row, from 0;
    ``sample_ids`` [B] the index in the dataset (in a stream the count of samples before it; -1: padding).
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    documents_BS: torch.Tensor
    sample_ids: torch.Tensor


def accumulation(*, global_batch: int, local_batch: int, data_degree: int) -> int:
    """Forwards per step; ConfigError if the global batch is no multiple of what the ranks read at once."""
    at_once = local_batch * data_degree
    if global_batch % at_once:
        message = f"{global_batch} is no multiple of local_batch * data ranks = {local_batch} * {data_degree}"
        hint = f"train.global_batch={-(-global_batch // at_once) * at_once}"
        raise ConfigError(message, key="train.global_batch", hint=hint)
    return global_batch // at_once


class Batches:
    """Endless iterator of steps; each is a list of ``Batch``, one per forward. A context manager; or call ``close``.

    Global sample g is ``permutation(seed, epoch = g // N)[g % N]``, or ``g % N`` without ``shuffle``; forward a, data
    rank r, row j of the step that starts at position p takes ``g = p + (a * data_degree + r) * local_batch + j``. A
    stream is read whole by every rank, which keeps its rows.

    Args:
        position: global samples consumed before the first step; as an attribute, by the steps handed out.
        prefetch: steps prepared ahead by a thread; 0: none. Its errors are raised by ``next``.
        state: what ``state()`` returned; replaces ``position``. Needed to resume a stream without reading it again.

    Raises:
        ConfigError: batch sizes do not fit. DataError: the data is not that of ``state``; or, while iterating, reading
            fails or a token id does not fit the model.
    """

    def __init__(
        self,
        dataset: TokenData,
        *,
        seed: int,
        global_batch: int,
        local_batch: int,
        data_rank: int,
        data_degree: int,
        position: int = 0,
        prefetch: int = 2,
        shuffle: bool = True,
        state: dict[str, Any] | None = None,
    ) -> None:
        accumulation(global_batch=global_batch, local_batch=local_batch, data_degree=data_degree)
        self._dataset, self._global_batch = dataset, global_batch
        self._order = {"seed": seed, "shuffle": shuffle}
        self._cursor: Cursor | None = None  # of streams: a row cannot be found from a count of samples
        self.position = position
        if state is not None:
            _check_state(state, dataset, self._order)
            self.position = state["position"]
            self._cursor = Cursor(*state["cursor"]) if state["cursor"] else None
        offsets = _offsets(global_batch, local_batch, data_rank, data_degree)
        steps: Iterator[tuple[Rows, Cursor | None]]
        if isinstance(dataset, StreamData):
            steps = _stream_steps(dataset, self._cursor, self.position, global_batch, offsets)
        else:
            indexed = cast(IndexedData, dataset)
            if len(indexed) < global_batch and data_rank == 0:
                log.info("an epoch has %d samples, fewer than a step's %d: steps repeat it", len(indexed), global_batch)
            steps = _indexed_steps(indexed, self._order, self.position, global_batch, offsets)
        batches = ((_collate(rows, local_batch), cursor) for rows, cursor in steps)
        self._steps = Prefetcher(batches, prefetch) if prefetch else batches
        # a finalizer, not __del__: it also runs when the interpreter exits, while threads can still be joined
        self._close = weakref.finalize(self, self._steps.close)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[Batch]:
        # position and cursor are those of the steps handed out; the thread is further ahead
        step, cursor = next(self._steps)
        self.position += self._global_batch
        self._cursor = cursor
        return step

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """Passes over the data that the steps handed out have completed."""
        if isinstance(self._dataset, StreamData):
            return self._cursor.epoch if self._cursor else 0
        return self.position // len(cast(IndexedData, self._dataset))

    def state(self) -> dict[str, Any]:
        """JSON-able: where to go on, and of which data this is the position. The same on every rank."""
        progress = {"position": self.position, "cursor": list(self._cursor) if self._cursor else None}
        return progress | {"fingerprint": self._dataset.fingerprint, "identity": self._dataset.identity} | self._order

    def close(self) -> None:
        """Stop the thread; the steps that it has prepared are dropped."""
        self._close()


def validation_batches(
    dataset: TokenData, *, global_batch: int, local_batch: int, data_rank: int, data_degree: int, batches: int
) -> Iterator[list[Batch]]:
    """Steps over the first samples of a dataset, at most one epoch: each sample once, the same ones for every mesh."""
    accumulation(global_batch=global_batch, local_batch=local_batch, data_degree=data_degree)
    limit = batches * global_batch
    samples: list[Sample] | IndexedData
    samples = dataset.first(limit) if isinstance(dataset, StreamData) else cast(IndexedData, dataset)
    count = min(limit, len(samples))
    offsets = _offsets(global_batch, local_batch, data_rank, data_degree)
    at_once = local_batch * data_degree
    zeros = np.zeros(dataset.seq_len, dtype=np.int64)
    padding = Sample(zeros, np.full(dataset.seq_len, IGNORED, dtype=np.int64), zeros)
    for start in range(0, count, global_batch):
        forwards = -(-min(global_batch, count - start) // at_once)
        indices = [start + offset for offset in offsets[: forwards * local_batch]]
        # padding: all ranks make the same number of forwards, and so the same collectives
        rows = [(i, samples[i]) if i < count else (-1, padding) for i in indices]
        yield _collate(rows, local_batch)


def _offsets(global_batch: int, local_batch: int, data_rank: int, data_degree: int) -> list[int]:
    """Rows of a step that one data rank takes, in the order in which it takes them."""
    assert 0 <= data_rank < data_degree
    starts = range(data_rank * local_batch, global_batch, local_batch * data_degree)
    return [start + row for start in starts for row in range(local_batch)]


def _indexed_steps(
    dataset: IndexedData, order: dict[str, Any], position: int, global_batch: int, offsets: list[int]
) -> Iterator[tuple[Rows, None]]:
    size, current_epoch = len(dataset), -1
    permutation: Permutation | range = range(size)
    while True:
        rows = []
        for offset in offsets:
            # a step may straddle the end of an epoch
            epoch, index = divmod(position + offset, size)
            if order["shuffle"] and epoch != current_epoch:
                current_epoch, permutation = epoch, Permutation(size, seed=order["seed"], epoch=epoch)
            index = permutation[index]
            rows.append((index, dataset[index]))
        position += global_batch
        yield rows, None


def _stream_steps(
    dataset: StreamData, cursor: Cursor | None, position: int, global_batch: int, offsets: list[int]
) -> Iterator[tuple[Rows, Cursor | None]]:
    samples = dataset.samples(cursor or Cursor())
    if position and cursor is None:
        log.warning("reading %d samples of the stream again: no cursor was saved with the position", position)
        for _ in range(position):
            next(samples)
    own_offsets = set(offsets)
    while True:
        rows = []
        # the rows of other ranks are read too: where a row of ours begins follows from the length of all before it
        for offset in range(global_batch):
            sample, cursor = next(samples)
            if offset in own_offsets:
                rows.append((position + offset, sample))
        position += global_batch
        yield rows, cursor


def _collate(rows: Rows, local_batch: int) -> list[Batch]:
    batches = []
    for start in range(0, len(rows), local_batch):
        ids, samples = zip(*rows[start : start + local_batch], strict=True)
        tokens, labels, documents = (torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True))
        batches.append(Batch(tokens, labels, documents, torch.tensor(ids, dtype=torch.int64)))
    return batches


def _check_state(state: dict[str, Any], dataset: TokenData, order: dict[str, Any]) -> None:
    """A position means something only for the same samples in the same order."""
    old = state["identity"] | {name: state[name] for name in order}
    new = dataset.identity | order
    if state["fingerprint"] == dataset.fingerprint and old == new:
        return
    lines = [f"{k}: {old.get(k)} then, {new.get(k)} now" for k in sorted(old | new) if old.get(k) != new.get(k)]
    # a packed corpus can tell which files differ
    files = dataset.explain(state["identity"]) if hasattr(dataset, "explain") else []
    lines += files[:10]  # a corpus may have millions
    if len(files) > 10:
        lines.append(f"... {len(files) - 10} more files")
    message = "the data is not what the checkpoint was trained on:\n    " + "\n    ".join(lines)
    hint = "the old data and settings, or a new run (run.id) that starts from step 0"
    raise DataError(message, key="data", hint=hint)
