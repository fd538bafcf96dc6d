"""Batches on their way to the devices while earlier steps run: the one place where the loop and the data meet."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

DEPTH = 2
"""Batches kept on the devices beside the one in use."""
_PATIENCE_S = 5.0
"""How long `close` waits for a source that is stuck, in a file system that hangs say."""


class Prefetch(Generic[S, T]):
    """The batches of a source in its order, each put on the devices by a thread before it is asked for.

    What goes wrong in the thread is raised by `next`, after the batches before it, as it was raised there. Close it, or
    use it as a context manager: then the source is closed too, by the thread.

    Args:
        source: batches on the host.
        put: sends one to the devices.
        depth: batches that may wait there, at least 1. The thread has one more in its hands.
    """

    def __init__(self, source: Generator[S, None, None], put: Callable[[S], T], depth: int = DEPTH) -> None:
        self._source, self._put = source, put
        self._queue: queue.Queue[tuple[T] | Exception] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether `next` answers at once, after waiting at most so long for it."""
        with self._queue.not_empty:
            return self._queue.not_empty.wait_for(lambda: bool(self._queue.queue), seconds)

    def __iter__(self) -> Prefetch[S, T]:
        return self

    def __next__(self) -> T:
        item = self._queue.get()
        if isinstance(item, Exception):
            self._queue.put(item)  # Nothing comes after it: the next call ends in the same way.
            raise item
        return item[0]

    def close(self) -> None:
        """End the thread and the source. Closing twice does nothing more."""
        self._stop.set()
        until = time.monotonic() + _PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):  # The thread may wait for room.
                self._queue.get_nowait()
            self._thread.join(0.01)

    def __enter__(self) -> Prefetch[S, T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        last: Exception = StopIteration()
        try:
            with contextlib.closing(self._source):
                for batch in self._source:
                    if self._stop.is_set():
                        return
                    self._queue.put((self._put(batch),))
        except Exception as error:
            last = error
        self._queue.put(last)
