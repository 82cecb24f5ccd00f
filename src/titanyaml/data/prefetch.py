"""An iterator that runs ahead in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _QueueEnd(NamedTuple):
    """The last item of the queue: the iterator is exhausted, or failed."""

    error: BaseException | None = None


class Prefetcher(Generic[T]):
    """Items of an iterator, at most ``depth`` of them prepared by a thread.

    An error of the iterator is raised where its item would have come, and again by every later ``next``.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        assert depth > 0
        self._queue: queue.Queue[T | _QueueEnd] = queue.Queue(maxsize=depth)  # bounded: steps take memory
        self._stop = threading.Event()
        self._end: _QueueEnd | None = None
        # the thread has no reference to self: a forgotten object can then be collected, and its thread stops
        arguments = (items, self._queue, self._stop)
        self._thread = threading.Thread(target=_produce, args=arguments, name="titanyaml-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            if self._stop.is_set():  # closed: the queue may never get another item
                raise StopIteration
            item = self._queue.get()
            if not isinstance(item, _QueueEnd):
                return item
            self._end = item
        if self._end.error is None:
            raise StopIteration
        raise self._end.error

    def close(self) -> None:
        """Stop the thread and wait for it; a read that hangs is left behind after five seconds."""
        self._stop.set()
        self._thread.join(timeout=5.0)


def _produce(items: Iterator[T], out: queue.Queue[T | _QueueEnd], stop: threading.Event) -> None:
    try:
        for item in items:
            if not _put(out, item, stop):
                return
        _put(out, _QueueEnd(), stop)
    except BaseException as error:  # the consumer raises it
        _put(out, _QueueEnd(error), stop)


def _put(out: queue.Queue[T | _QueueEnd], item: T | _QueueEnd, stop: threading.Event) -> bool:
    """Whether the item went into the queue; False once ``stop`` is set."""
    while not stop.is_set():
        with contextlib.suppress(queue.Full):
            out.put(item, timeout=0.1)  # short: nobody may ever take an item again, and stop is looked at between
            return True
    return False
