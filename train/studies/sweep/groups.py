"""Which points of a sweep are one program: those that differ in numbers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mupax.train.config.run import CheckpointConfig, Config, FaultsConfig, LogConfig, PresetConfig
from mupax.train.core.program import Program, assemble

Member = tuple[int, Program]
"""A point: its place among the sweep's configs, and its program."""


class Groups:
    """Programs of configs; nothing is compiled or allocated, and a definition is made once per shape.

    Args:
        devices: all there are unless given.
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
            made = self._first.get(shape)
            program = assemble(config, self._devices, swept=True) if made is None else made.renumbered(config)
            self._first.setdefault(shape, program)
            groups.setdefault((shape, _structure(program)), []).append((index, program))
        return groups


def shape_of(config: Config) -> Config:
    """The config with every number that is data to the step at one value: equal shapes are one program.

    A preset can still change the program, by a factor that it has and others do not; `Groups` looks at that too.
    """
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


def _structure(program: Program) -> Any:
    leaves, tree = jax.tree.flatten(program.run)
    return tree, tuple((np.shape(leaf), np.asarray(leaf).dtype.str) for leaf in leaves)
