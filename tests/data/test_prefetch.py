"""The iterator that runs ahead."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest

from titanyaml.data.prefetch import Prefetcher


def wait_for(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def data_threads() -> int:
    return sum(thread.name == "titanyaml-data" for thread in threading.enumerate())


def test_items_come_in_order_and_end() -> None:
    ahead = Prefetcher(iter(range(50)), 3)
    assert list(ahead) == list(range(50))
    assert list(ahead) == []


def test_it_runs_ahead_but_not_further_than_its_depth() -> None:
    produced = []
    ahead = Prefetcher((produced.append(number) or number for number in itertools.count()), 3)
    assert wait_for(lambda: len(produced) == 4)  # three in the queue, one waiting to go in
    time.sleep(0.2)
    assert len(produced) == 4
    assert next(ahead) == 0
    assert wait_for(lambda: len(produced) == 5)
    ahead.close()


def test_an_error_comes_where_its_item_would_have_and_again() -> None:
    def fails():
        yield 1
        raise RuntimeError("broken at the second")

    ahead = Prefetcher(fails(), 2)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken at the second"):
            next(ahead)


def test_close_stops_the_thread_even_when_the_queue_is_full() -> None:
    before = data_threads()
    ahead = Prefetcher(itertools.count(), 1)
    assert data_threads() == before + 1
    ahead.close()
    ahead.close()
    assert data_threads() == before


def test_a_forgotten_iterator_can_be_collected() -> None:
    ahead = Prefetcher(itertools.count(), 1)
    thread = ahead._thread
    assert not [referrer for referrer in gc.get_referrers(ahead) if isinstance(referrer, threading.Thread)]
    ahead.close()
    assert not thread.is_alive()
