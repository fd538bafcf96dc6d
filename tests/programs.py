"""Runs of one test file that compute the same, and differ in what they write, share what is compiled: `shared_programs`.

A file imports the fixture. A test that replaces what a step is made of asks for `own_programs`. What one run alone compiles, and that it
does so once, is tested in tests/train/run/test_loop.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train.config.run import CheckpointConfig, FaultsConfig, InitConfig, LogConfig, StopConfig
from mupax.train.core.program import Program

COMPILED = ("compile_train", "compile_eval", "compile_logits")
ALONE = {name: getattr(Program, name) for name in (*COMPILED, "initial_state")}


def key(program: Program) -> Any:
    """What the compiled steps of two runs agree on: all but names, places, lengths, rates, limits and seeds, which no program has."""
    config = program.config
    kind, named, _ = config.data.name.partition(":")
    same = dataclasses.replace(
        config,
        recipe="",
        workdir=None,
        steps=1 << 30,
        seed=0,
        resume=False,
        resume_change=(),
        resume_from=None,
        stop=StopConfig(),
        log=LogConfig(),
        checkpoint=CheckpointConfig(),
        init=InitConfig(),
        faults=FaultsConfig(),
        data=dataclasses.replace(config.data, evaluate=(), name=f"{kind}:x" if named else kind),
        optimizer=dataclasses.replace(
            config.optimizer, peak_lr=1.0, schedule="constant", warmup_steps=1, decay_steps=None
        ),
    )
    arrays = program.abstract, program.inputs, program.stds
    return same, program.mesh, tuple((np.shape(leaf), np.result_type(leaf)) for leaf in jax.tree.leaves(arrays))


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> Iterator[None]:
    """The first program of each `key` compiles for all, in this file."""
    first: dict[Any, Program] = {}

    def shared(name: str) -> Callable[..., Any]:
        made: dict[Any, Any] = {}

        def compiled(self: Program, *arguments: Any) -> Any:
            if self.free:
                return ALONE[name](self, *arguments)
            if (one := key(self)) not in made:
                made[one] = ALONE[name](self, *arguments)
            return made[one]

        return compiled

    def initial_state(self: Program) -> Any:
        return first.setdefault(key(self), self).initializer.state(self.config.seed, self.stds)

    with pytest.MonkeyPatch.context() as patch:
        for name in COMPILED:
            patch.setattr(Program, name, shared(name))
        patch.setattr(Program, "initial_state", initial_state)
        yield


@pytest.fixture
def own_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this test compile for themselves."""
    for name, method in ALONE.items():
        monkeypatch.setattr(Program, name, method)
