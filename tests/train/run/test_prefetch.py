"""Batches put on the devices ahead of time: order, bounds, errors, and an end that leaves no thread behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator

import pytest

from mupax.train.data import interface
from mupax.train.data.interface import Prefetch

pytestmark = pytest.mark.core


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Source:
    """Numbers from 0, and what became of them."""

    def __init__(self, stop: int, error: Exception | None = None) -> None:
        self.count, self.closed, self.thread = 0, False, threading.current_thread()
        self._stop, self._error = stop, error

    def batches(self) -> Generator[int, None, None]:
        try:
            for number in range(self._stop):
                self.count, self.thread = number + 1, threading.current_thread()
                yield number
            if self._error:
                raise self._error
        finally:
            self.closed = True


def test_every_batch_comes_once_in_order_and_then_the_end() -> None:
    source = Source(7)
    with Prefetch(source.batches(), lambda number: number * number) as ahead:
        assert list(ahead) == [0, 1, 4, 9, 16, 25, 36]
        with pytest.raises(StopIteration):
            next(ahead)
    assert source.closed
    assert source.thread is not threading.main_thread()


@pytest.mark.parametrize("depth", [1, 3])
def test_it_runs_ahead_so_far_and_no_further(depth: int) -> None:
    source = Source(100)
    with Prefetch(source.batches(), lambda number: number, depth) as ahead:
        until(lambda: source.count == depth + 1)
        time.sleep(0.02)
        assert source.count == depth + 1  # One more in the thread's hands.
        assert next(ahead) == 0
        until(lambda: source.count == depth + 2)


@pytest.mark.parametrize("where", ["source", "put"])
def test_an_error_reaches_the_caller_after_the_batches_before_it(where: str) -> None:
    error = OSError("shard 3 is gone")

    def put(number: int) -> int:
        if where == "put" and number == 2:
            raise error
        return number

    source = Source(2 if where == "source" else 9, error)
    with Prefetch(source.batches(), put) as ahead:
        assert [next(ahead), next(ahead)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="shard 3 is gone") as caught:
                next(ahead)
            assert caught.value is error
    assert source.closed


def test_closing_early_ends_the_thread_and_the_source() -> None:
    source = Source(10**9)
    ahead = Prefetch(source.batches(), lambda number: number, 1)
    until(lambda: source.count == 2)  # It waits for room now.
    ahead.close()
    assert source.closed
    assert not source.thread.is_alive()
    ahead.close()


def test_a_source_that_hangs_does_not_hang_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_PATIENCE_S", 0.05)
    release = threading.Event()

    def hung() -> Generator[int, None, None]:
        yield 0
        release.wait(30)

    with Prefetch(hung(), lambda number: number) as ahead:
        assert next(ahead) == 0
        assert not ahead.ready()
    assert ahead._thread.is_alive()
    release.set()
    until(lambda: not ahead._thread.is_alive())


def test_ready_says_whether_there_is_a_wait() -> None:
    gate = threading.Event()

    def slow() -> Generator[int, None, None]:
        gate.wait(30)
        yield 1

    with Prefetch(slow(), lambda number: number) as ahead:
        assert not ahead.ready()
        gate.set()
        until(ahead.ready)
        assert next(ahead) == 1
