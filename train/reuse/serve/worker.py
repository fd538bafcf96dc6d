"""One thread that has the device: requests queue for it, and a few of them take turns there."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mupax.train.reuse.generate.decode import Generator

TURNS = 4
"""Texts that are written in turns, each with a cache of its own; the others wait."""
WAITING = 64
"""Requests that may wait."""
_STOP_S = 3.0


class BusyError(Exception):
    """More requests wait than may."""


class Job:
    """Work for the device, whose parts come out one by one.

    Args:
        start: makes the parts with the generator.
    """

    def __init__(self, start: Callable[[Generator], Iterator[Any]]) -> None:
        self.start = start
        self.done = threading.Event()
        """Set by who needs no more parts."""
        self._parts: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, part: Any, error: BaseException | None = None, last: bool = False) -> None:
        """Hand over a part, an error, or that there are no more.

        Args:
            part: of the work.
            error: raised where parts are taken.
            last: whether there are no more.
        """
        self._parts.put((part, error, last))

    def parts(self) -> Iterator[Any]:
        """The parts as they are made; ends the work where they are no longer taken. Raises what the work raised."""
        try:
            while True:
                part, error, last = self._parts.get()
                if error is not None:
                    raise error
                if last:
                    return
                yield part
        finally:
            self.done.set()


class Worker:
    """The thread.

    Args:
        generator: what it works with; no other thread touches it.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._inbox: queue.Queue[Job | None] = queue.Queue(WAITING)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mupax-serve", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Job:
        """The job, in the queue; raises BusyError where that is full."""
        try:
            self._inbox.put_nowait(job)
        except queue.Full:
            raise BusyError from None
        return job

    def stop(self) -> None:
        """End the thread after the part that it makes now."""
        self._stopped.set()
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait(None)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        turns: collections.deque[tuple[Job, Iterator[Any]]] = collections.deque()
        while not self._stopped.is_set():
            while len(turns) < TURNS and (not turns or not self._inbox.empty()):
                job = self._inbox.get()
                if job is None:
                    return
                turns.append((job, job.start(self.generator)))
            job, parts = turns.popleft()
            if job.done.is_set():
                continue
            try:
                job.put(next(parts))
                turns.append((job, parts))
            except StopIteration:
                job.put(None, last=True)
            except Exception as error:
                job.put(None, error)
