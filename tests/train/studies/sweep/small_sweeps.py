"""Small sweeps: points of a narrow decoder on a text of a few words."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, DataConfig
from mupax.train.core.program import Program
from mupax.train.studies.sweep import sweep, trainer
from mupax.train.studies.sweep.trainer import Trainer
from mupax.zoo.configs import DecoderConfig

STEPS = 12
RATES = (2.0**-9, 2.0**-7)
COMMAND = (
    "lm-tiny --model.width 16 --model.num-heads 2 --model.depth 1 --model.seq-len 16 "
    "--data.batch-size 8 --data.eval-examples 20 --optimizer.warmup-steps 2 --steps 4"
)
WORDS = ("def", "return", "import", "class", "self", "value", "lambda", "yield", "while", "None")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the data name of a text of a few words."""
    path = tmp_path_factory.mktemp("sweep") / "text.txt"
    choose = random.Random(0)
    lines = []
    for _ in range(600):
        lines.append(" ".join(choose.choice(WORDS) for _ in range(9)))
    path.write_text("\n".join(lines))
    return f"text:{path}"


@pytest.fixture(scope="module")
def shared_trainers() -> Iterator[None]:
    """Let the sweeps of a file share compiled trainers, as one engine does for its own points."""
    compiled: dict[object, Trainer] = {}
    compile_trainer = trainer.compile_trainer

    def compile_once(program: Program, count: int, evaluated: bool) -> Trainer:
        inputs = jax.tree.map(jax.typeof, program.inputs)
        devices = tuple(program.mesh.devices.flat)
        shape = repr((sweep.shape_of(program.config), inputs))
        key = (shape, program.mesh.axis_names, devices, count, evaluated)
        if key not in compiled:
            compiled[key] = compile_trainer(program, count, evaluated)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "compile_trainer", compile_once)
        yield


def config_of(text: str, **changes: Any) -> Config:
    """Return the config of a point.

    Args:
        **changes: Fields to replace; those of `model` and `optimizer` are dicts.
    """
    recipe = RECIPES["lm-tiny"]()
    assert isinstance(recipe.model, DecoderConfig)
    small = {"width": 16, "num_heads": 2, "depth": 1, "seq_len": 16}
    model = dataclasses.replace(recipe.model, **small | changes.pop("model", {}))
    optimizer = {"warmup_steps": 2} | changes.pop("optimizer", {})
    return dataclasses.replace(
        recipe,
        model=model,
        data=DataConfig(name=text, batch_size=16, eval_batch_size=16, eval_examples=20, seed=0),
        optimizer=dataclasses.replace(recipe.optimizer, **optimizer),
        steps=STEPS,
        **changes,
    )


def points(config: Config, rates: Iterable[float] = RATES, seeds: int = 2) -> list[Config]:
    configs = []
    for rate in rates:
        optimizer = dataclasses.replace(config.optimizer, peak_lr=rate)
        for seed in range(seeds):
            configs.append(dataclasses.replace(config, seed=seed, optimizer=optimizer))
    return configs


class Noted(sweep.SweepCallback):
    """Watcher that keeps the notes of a sweep."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def note(self, text: str) -> None:
        self.notes.append(text)
