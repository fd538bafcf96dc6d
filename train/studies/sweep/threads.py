"""Packs of points side by side, a thread each: on a CPU a small model's step leaves cores idle that another point's can use.

The program is the same, so a point has the bits that it has alone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed

import numpy as np

from mupax.train.config.run import Config
from mupax.train.studies.sweep.groups import Member
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.sweep.work import Stopped, Watcher, Work

Pack = Sequence[Member]


def trained(work: Work, packs: Sequence[Pack], threads: int) -> Iterator[tuple[Pack, list[tuple[int, Row]]]]:
    """Every pack with its rows, as it is done.

    Args:
        work: what trains a pack; its watcher is told from several threads (`OneAtATime`).
        packs: in the order in which they begin.
        threads: packs at a time, where there are so many.

    Raises:
        Stopped: after every pack in training is saved and the rows of those that were done are given; an error of any of
            them comes before it.
    """
    threads = min(threads, len(packs))
    if threads == 1:
        for pack in packs:
            yield pack, work.train(pack)
        return
    leave = threading.Event()
    each = dataclasses.replace(work, stop=lambda: leave.is_set() or work.stop(), beside=threads)
    error: BaseException | None = None
    with ThreadPoolExecutor(threads, thread_name_prefix="points") as pool:
        running = {pool.submit(each.train, pack): pack for pack in packs}
        try:
            for future in as_completed(running):
                try:
                    found = future.result()
                except CancelledError:
                    continue
                except BaseException as raised:
                    error = raised if error is None or isinstance(error, Stopped) else error
                    _end(leave, running)
                    continue
                yield running[future], found
        finally:
            _end(leave, running)
    if error is not None:
        raise error


def _end(leave: threading.Event, running: Iterable[Future]) -> None:
    """Those that train save and leave, the others never begin."""
    leave.set()
    for future in running:
        future.cancel()


class OneAtATime:
    """A watcher that several threads may tell things."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._lock = watcher, threading.Lock()

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        with self._lock:
            self._watcher.begin(configs, done)

    def note(self, text: str) -> None:
        with self._lock:
            self._watcher.note(text)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        with self._lock:
            self._watcher.training(points, step, losses)

    def finished(self, point: int, row: Row) -> None:
        with self._lock:
            self._watcher.finished(point, row)
