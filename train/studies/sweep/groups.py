"""Which points of a sweep are one program, those that differ in numbers alone, and the batches that all of them see."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from mupax.train import data as data_sources
from mupax.train.config.run import CheckpointConfig, Config, FaultsConfig, LogConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import Batch
from mupax.train.data import Data
from mupax.train.parallel.sharding import Feed

Member = tuple[int, Program]
"""A point: its place among the sweep's configs, and its program."""
CACHED_BYTES = 2**28
"""Batches kept in memory, for the points that train after the first."""


class Groups:
    """Programs of configs; nothing is compiled or allocated, and a definition is built once per shape.

    Args:
        devices: all there are by default.
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        self._devices = devices
        self._first: dict[str, Program] = {}

    def of(self, configs: Sequence[Config]) -> dict[object, list[Member]]:
        """The points in groups of one program each, by a key of it, in the order in which the first of each comes.

        Raises:
            ConfigError, PresetError, MeshError: what does not fit.
        """
        groups: dict[object, list[Member]] = {}
        for index, config in enumerate(configs):
            shape = repr(shape_of(config))
            first = self._first.get(shape)
            program = assemble(config, self._devices, swept=True) if first is None else first.renumbered(config)
            self._first.setdefault(shape, program)
            leaves, tree = jax.tree.flatten(program.inputs)  # a preset may have a factor that others do not
            structure = tree, tuple((np.shape(leaf), np.asarray(leaf).dtype.str) for leaf in leaves)
            groups.setdefault((shape, structure), []).append((index, program))
        return groups


def shape_of(config: Config) -> Config:
    """The config with every number that is data to the step at one value: equal shapes are one program."""
    same = dict.fromkeys(("peak_lr", "weight_decay", "eps"), 0.0)
    schedule = {"schedule": "constant", "warmup_steps": 0, "decay_steps": None, "final_lr_fraction": 0.0}
    return dataclasses.replace(
        config,
        preset=PresetConfig(),
        optimizer=dataclasses.replace(config.optimizer, **same, **schedule),
        ema=dataclasses.replace(config.ema, decay=None if config.ema.decay is None else 0.5),
        data=dataclasses.replace(config.data, seed=config.data_seed),
        seed=0,
        checkpoint=CheckpointConfig(),
        faults=FaultsConfig(),
        log=LogConfig(),
        workdir=None,
        resume=False,
    )


class Batches:
    """Training batches on the host, read once and cached where they are few, and the data they come from."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] = lambda text: None
        """Called with a line about what takes time."""
        self._data: dict[Any, Data] = {}
        self._cached: dict[Any, list[Any]] = {}
        self._lock = threading.RLock()

    def of(self, program: Program) -> Data:
        """The data of a program."""
        config, key = program.config, self._key(program)
        with self._lock:
            if key not in self._data:
                self._data[key] = data_sources.load(
                    config.data, config.model, seed=config.data_seed, note=lambda text: self.note(text)
                )
            return self._data[key]

    def train(self, program: Program, start: int, feed: Feed) -> Generator[Batch, None, None]:
        """Batches start, start + 1, ... on the devices.

        Args:
            program: whose data.
            start: number of the first batch.
            feed: puts a batch on the devices.
        """
        steps, cached = program.config.steps, self._cached.setdefault(self._key(program), [])
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in feed.abstract.values())
        if size * steps > CACHED_BYTES:
            with contextlib.closing(self.of(program).train_batches(start, *feed.rows)) as batches:
                yield from map(feed.put, batches)
            return
        with self._lock:
            if len(cached) < steps:
                with contextlib.closing(self.of(program).train_batches(len(cached), *feed.rows)) as batches:
                    cached.extend(next(batches) for _ in range(len(cached), steps))
        yield from map(feed.put, cached[start:steps])

    @staticmethod
    def _key(program: Program) -> Any:
        shapes = tuple((name, leaf.shape) for name, leaf in program.train_feed().abstract.items())
        data = dataclasses.replace(program.config.data, seed=program.config.data_seed)
        return data, shapes, getattr(program.config.model, "vocab_size", None)
