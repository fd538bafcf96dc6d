"""No field of a config is dead: another value changes something that a test can see.

Every field declares beside itself what it affects, with a value that shows it
(`mupax.config_fields.Affects`). A field that declares nothing fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import pytest

from mupax.config_fields import Affects, ConfigField, Effect, config_fields, with_defaults
from mupax.train import data as data_sources
from mupax.train.config.data import source
from mupax.train.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    FaultsConfig,
    LogConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import logits_of
from mupax.train.data.text.batches import TokenData
from mupax.train.parallel import distributed
from mupax.train.parallel.processes import place
from mupax.train.run import loop
from mupax.zoo.configs import ComputeConfig, DecoderConfig, EncoderDecoderConfig, ViTConfig
from tests.fixtures.devices import smallest_meshes
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import folder

__all__ = ["folder", "shared_programs"]  # fixtures

TESTS = next(path for path in Path(__file__).resolve().parents if path.name == "tests")

TOKENS = Config(
    recipe="lm-tiny",
    model=DecoderConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=2, vocab_size=256, seq_len=16, compute=ComputeConfig(layers="scan")
    ),
    data=DataConfig(name="text:text.txt", batch_size=8, eval_batch_size=16, eval_examples=30, tokenizer="bytes"),
    preset=PresetConfig(name="depth-mup", base="lm-proxy"),
    optimizer=OptimizerConfig(peak_lr=0.01, weight_decay=0.1, eps=1e-4, warmup_steps=1, schedule="cosine"),
    checkpoint=CheckpointConfig(every_steps=2),
    steps=6,
)  # fmt: skip
# All but `TOKENS` have no biases, since each of them is compiled into an update.
RUN = dataclasses.replace(
    TOKENS,
    model=dataclasses.replace(TOKENS.model, depth=1, bias=False),
    log=LogConfig(samples=False),
)
TEXT_TO_TEXT = dataclasses.replace(
    TOKENS,
    recipe="ed-tiny",
    model=EncoderDecoderConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=2, bias=False, vocab_size=256, seq_len=16
    ),
    data=dataclasses.replace(TOKENS.data, noise="infilling"),
    preset=PresetConfig(name="mup"),
)
IMAGES = dataclasses.replace(
    TOKENS,
    recipe="vit-digits",
    model=ViTConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=2, bias=False, image_size=8, patch_size=4,
        channels=1, num_classes=10,
    ),
    data=DataConfig(name="digits", batch_size=8),
    preset=PresetConfig(name="mup", base="vit-proxy"),
)  # fmt: skip


def changed(config: Any, path: str, value: Any) -> Any:
    """Return the config with another value of the field at a dotted path."""
    name, _, rest = path.partition(".")
    if rest:
        value = changed(getattr(config, name), rest, value)
    return dataclasses.replace(config, **{name: value})


# What shows a field. Each gives something that is compared between two configs.


@functools.cache
def program(config: Config) -> Program:
    """Return the program of the steps. `same` compares two of them."""
    return assemble(config)


@functools.cache
def numbers(config: Config) -> str:
    """Return a digest of the abstract state, the step's inputs, the mesh and the place of batches."""
    run_program = program(config)
    leaves, shape = jax.tree.flatten(run_program.abstract)
    values = [
        (np.asarray(leaf).tobytes(), np.shape(leaf))
        for leaf in jax.tree.leaves((run_program.inputs, run_program.stds))
    ]
    mesh = [device.id for device in run_program.mesh.devices.flat], run_program.mesh.shape
    feed = run_program.eval_feed().rows
    parts = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves], shape, values, mesh, feed
    return hashlib.sha256(repr(parts).encode()).hexdigest()


NOT_READ = {"targets", "weights", "labels"}
"""Arrays of a batch that the model does not read."""


def without_addresses(jaxpr: object) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


@functools.cache
def forward(config: Config) -> str:
    """Return the forward pass, which takes a fraction of the time of the step to trace."""
    run_program = program(config)
    batch = run_program.abstract_train_batch()
    inputs = batch.pop("inputs")
    context = {name: array for name, array in batch.items() if name not in NOT_READ}

    def logits(params: Any, step_inputs: Any, inputs: Any, context: Any) -> jax.Array:
        return logits_of(run_program.definition, params, step_inputs, inputs, **context)

    params = run_program.abstract.params
    arguments = params, run_program.abstract_inputs(), inputs, context
    return without_addresses(jax.make_jaxpr(logits)(*arguments))


@functools.cache
def train_step(config: Config) -> str:
    return without_addresses(program(config).trace_train().jaxpr)


def same(observe: Callable[[Config], Any], one: Config, other: Config) -> bool:
    """Return whether two configs show the same. What takes long is compared last."""
    if observe is not program:
        return observe(one) == observe(other)
    return all(part(one) == part(other) for part in (numbers, forward, train_step))


@functools.cache
def start(config: Config) -> bytes:
    """Return the initial parameters of one layer."""
    with smallest_meshes():
        params = assemble(changed(config, "model.depth", 1)).initial_state().params
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))


@functools.cache
def data(config: Config) -> str:
    """Return a digest of the first training batch, all evaluation batches and the prepared files."""
    source = data_sources.load(
        config.data, config.model, seed=config.data_seed, note=lambda _: None
    )
    parts: list[Any] = []
    for batch in (source.train_batch(0), *source.eval_batches()):
        parts += [(name, array.shape, array.tobytes()) for name, array in sorted(batch.items())]
    base = config.data.data_dir
    if base:
        parts += sorted(path.name for path in Path(base).iterdir())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def run(config: Config) -> tuple[list[str], dict[str, Any]]:
    """Return the files of a run, checkpoints among them, and what it prints of its course."""
    text = Path("text.txt").absolute()
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), smallest_meshes():
        shutil.copy(text, place)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert loop.run(config) == 0
        files = {
            re.sub(r"(/events\.|/checkpoints/\d+/).*", r"\1", str(path))
            for path in Path().rglob("*.*")
        }
        folders = {str(path) for path in Path().rglob("checkpoints/*") if path.name.isdigit()}
        rows = [path.read_text().count("eval_loss") for path in Path().rglob("metrics.jsonl")]
    course = {
        "evaluations": rows,
        "hangs": "watchdog:" in out.getvalue(),
        "lines": bool(re.search(r"(?m)^step +\d", out.getvalue())),
    }
    return sorted(files | folders), course


def slow_run(config: Config) -> Any:
    """Return what `run` does where the batch of step 4 takes 2.5 seconds."""
    read = TokenData.train_batch

    def slow(data: TokenData, k: int, *arguments: Any) -> Any:
        if k == 3:
            time.sleep(2.5)
        return read(data, k, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenData, "train_batch", slow)
        return run.__wrapped__(config)


def joined(config: Config) -> Any:
    """Return what JAX is told of the other processes."""
    told: list[Any] = []

    class Ended(Exception):
        pass

    def initialize(**options: Any) -> None:
        told.append(options)
        raise Ended

    process_place = place(config.distributed) or {}
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Ended):
        patch.setattr(jax.distributed, "initialize", initialize)
        with distributed.joined(process_place, config.distributed):
            pass
    return told


TWO = changed(
    TOKENS, "distributed", DistributedConfig(coordinator="localhost:1", processes=2, process=1)
)
OBSERVED_BY: dict[Effect, Callable[[Config], Any]] = {
    **dict.fromkeys(("model", "step", "rounding", "layout", "compiler"), program),
    "start": start,
    **dict.fromkeys(("data", "batches"), data),
    **dict.fromkeys(("course", "guards", "reports", "origin", "session"), run),
    "processes": joined,
}
"""Effect to what shows it."""
SMALL_RUNS = {run: RUN, joined: TWO}
"""What shows an effect to the config that it is shown on, if that is not `TOKENS`."""


def fields() -> dict[str, tuple[Config, ConfigField]]:
    """Path of every field to the first of the configs that has it and reads it."""
    listed: dict[str, tuple[Config, ConfigField]] = {}
    images_only = source(IMAGES.data.name).reads - source(TOKENS.data.name).reads
    for config in (TOKENS, IMAGES, TEXT_TO_TEXT):
        for field in config_fields(config):
            section = field.path.removeprefix("data.").partition(".")[0]
            is_unread = (
                config is TOKENS and field.path.startswith("data.") and section in images_only
            )
            if not is_unread:
                listed.setdefault(field.path, (config, field))
    return listed


FIELDS = fields()


def is_dead(config: Config, path: str, affects: Affects) -> bool:
    """Return whether another value of a field changes nothing, or no test has its flag."""
    if affects.test:
        text = (TESTS / affects.test).read_text()
        name = path.rpartition(".")[2]
        flag = name.replace("_", "-")
        return not re.search(rf'--[\w.-]*{flag}\b|\b{name}=|"{name}"', text)
    observe = OBSERVED_BY[affects.effect]
    config = SMALL_RUNS.get(observe, config)
    for other, value in affects.given.items():
        config = changed(config, other, value)
    return same(observe, config, changed(config, path, affects.example))


def test_every_field_declares_what_it_affects() -> None:
    assert [path for path, (_, field) in FIELDS.items() if field.affects is None] == []


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_is_not_dead(path: str) -> None:
    config, field = FIELDS[path]
    assert field.affects is not None
    assert not is_dead(config, path, field.affects)


def test_a_run_whose_data_hang_is_reported_after_the_watchdogs_seconds() -> None:
    patient = dataclasses.replace(RUN, faults=FaultsConfig(watchdog_seconds=100.0))
    eager = dataclasses.replace(RUN, faults=FaultsConfig(watchdog_seconds=1.0))
    assert slow_run(patient) != slow_run(eager)


@pytest.mark.parametrize("observe", [run, data, joined, start])
def test_control_nothing_changed_is_nothing_seen(observe: Callable[[Config], Any]) -> None:
    config = SMALL_RUNS.get(observe, RUN)
    # All but `joined` keep what they have seen; the second observation is another.
    again = getattr(observe, "__wrapped__", observe)
    assert again(changed(config, "recipe", config.recipe)) == observe(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted(OptimizerConfig):
    """Fields that nobody reads. One has the name of another owner's field, one declares nothing."""

    forgotten: Annotated[float, Affects("step", 1.0)] = 0.0
    depth: Annotated[int, Affects("step", 2)] = 1
    undeclared: int = 0


def test_control_planted_dead_fields_are_seen() -> None:
    config = changed(TOKENS, "optimizer", Planted(**dataclasses.asdict(TOKENS.optimizer)))
    planted = {
        field.path: field.affects for field in config_fields(config) if field.path not in FIELDS
    }
    assert planted.pop("optimizer.undeclared") is None
    assert set(planted) == {"optimizer.forgotten", "optimizer.depth"}
    for path, affects in planted.items():
        assert affects is not None
        assert is_dead(config, path, affects)
    peak_lr = FIELDS["optimizer.peak_lr"][1].affects
    assert peak_lr is not None
    assert not is_dead(config, "optimizer.peak_lr", peak_lr)
    assert is_dead(config, "log.wandb", Affects("reports", test="train/checkpoints/test_turns.py"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plotting:
    path: Annotated[str, Affects("reports")]
    size: Annotated[int, Affects("reports")] = 3
    labels: Annotated[tuple[str, ...], Affects("reports")] = dataclasses.field(
        default_factory=tuple
    )


def test_a_field_has_its_default_from_a_factory() -> None:
    plotting = Plotting(path="a.png", size=4, labels=("x",))
    defaults = {field.path: field.default for field in config_fields(plotting)}
    assert defaults == {"path": dataclasses.MISSING, "size": 3, "labels": ()}
    # A required field has no default to go back to.
    assert with_defaults(plotting, ("reports",)) == Plotting(path="a.png")
