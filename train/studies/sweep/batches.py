"""The batches that all points of a sweep see: made once, kept on the host where they are few."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator
from typing import Any

from mupax.train import data as data_sources
from mupax.train.core.program import Program
from mupax.train.core.step import Batch
from mupax.train.data import Data
from mupax.train.parallel.feed import Feed

CACHED_BYTES = 2**28
"""Batches kept in memory, for the points that train after the first."""


class Batches:
    """Training batches on the host, made once and kept where they are few, and the data they come from."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] = lambda text: None
        """Told, in a line, what takes time."""
        self._data: dict[Any, Data] = {}
        self._kept: dict[Any, list[Any]] = {}
        self._lock = threading.RLock()

    def of(self, program: Program) -> Data:
        """The data of a program."""
        config = program.config
        key = self._key(program)
        with self._lock:
            if key not in self._data:
                self._data[key] = data_sources.load(
                    config.data, config.model, seed=config.data_seed, note=lambda text: self.note(text)
                )
            return self._data[key]

    def train(self, program: Program, start: int, feed: Feed) -> Generator[Batch, None, None]:
        """Batches start, start + 1, ... on the devices."""
        steps, kept = program.config.steps, self._kept.setdefault(self._key(program), [])
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in feed.abstract.values())
        if size * steps > CACHED_BYTES:
            with contextlib.closing(self.of(program).train_batches(start, *feed.rows)) as batches:
                for batch in batches:
                    yield feed.put(batch)
            return
        with self._lock:
            if len(kept) < steps:
                with contextlib.closing(self.of(program).train_batches(len(kept), *feed.rows)) as batches:
                    kept.extend(next(batches) for _ in range(len(kept), steps))
        for batch in kept[start:steps]:
            yield feed.put(batch)

    @staticmethod
    def _key(program: Program) -> Any:
        shapes = tuple((name, leaf.shape) for name, leaf in program.train_feed().abstract.items())
        data = dataclasses.replace(program.config.data, seed=program.config.data_seed)
        return data, shapes, getattr(program.config.model, "vocab_size", None)
