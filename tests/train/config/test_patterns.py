"""Runs that train some parameters: which ones patterns mean, that the others stay to the last bit, and cost nothing."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from mupax.train.config import checks
from mupax.train.config.run import (
    Config,
    DataConfig,
    EmaConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import TrainState
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.definition import definition
from tests.fixtures.small_runs import folder, record_of, train

__all__ = ["folder"]  # a fixture

DECODER = DecoderConfig(width=16, depth=1, num_heads=4, mlp_ratio=1.5, vocab_size=16, seq_len=7)
WHOLE = Config(
    recipe="tiny", model=DECODER, data=DataConfig(name="text:x", batch_size=8), mesh=MeshConfig(data=1), steps=5,
    preset=PresetConfig(name="mup", base="lm-proxy"), ema=EmaConfig(decay=0.9),
    optimizer=OptimizerConfig(peak_lr=0.02, weight_decay=0.1),
)  # fmt: skip
FROZEN = ("token_embedding", "query", "block.mlp.down*")
NAMES = {
    "token", "block.attention.query", "block.attention.query_bias", "block.mlp.down", "block.mlp.down_bias",
}  # fmt: skip
SPECS = definition(DECODER).specs


def config(**changes: Any) -> Config:
    return dataclasses.replace(WHOLE, **changes)


def batches() -> list[Any]:
    tokens = np.random.default_rng(0).integers(0, 16, (3, 8, 8), np.int32)
    return [
        {"inputs": t[:, :-1], "targets": t[:, 1:], "weights": np.ones((8, 7), np.float32)}
        for t in tokens
    ]


class Steps(NamedTuple):
    program: Program
    states: list[TrainState]
    """At the start, and after each of three steps."""
    first: dict[str, Any]
    """Metrics of the first step."""


@functools.cache
def trained(run: Config) -> Steps:
    program = assemble(run, jax.devices()[:1])
    step = program.compile_train()
    step_inputs = program.step_inputs()
    state = program.initial_state()
    states = [jax.device_get(state)]
    history: list[dict[str, Any]] = []
    for batch in batches():
        state, metrics = step(state, step_inputs, program.train_feed().shard_batch(batch))
        states.append(jax.device_get(state))
        history.append(jax.device_get(metrics))
    return Steps(program, states, history[0])


@pytest.mark.core
@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("query", {"block.attention.query", "block.attention.query_bias"}),
        ("block.query", {"block.attention.query"}),
        ("block.attention.qu*", {"block.attention.query", "block.attention.query_bias"}),
        ("bias", {name for name in SPECS if "bias" in name}),
        ("token_embedding", {"token"}),
        ("*", set(SPECS)),
    ],
)
def test_a_pattern_means_a_role_a_row_or_names(pattern: str, names: set[str]) -> None:
    assert checks.chosen([pattern], SPECS, "--freeze") == names


@pytest.mark.core
def test_what_is_trained_is_chosen_and_then_left_out() -> None:
    assert checks.trained([], [], SPECS) == SPECS
    assert set(checks.trained([], FROZEN, SPECS)) == SPECS.keys() - NAMES
    assert set(checks.trained(["mlp_in", "mlp_out"], ["bias"], SPECS)) == {
        "block.mlp.up",
        "block.mlp.down",
    }


@pytest.mark.core
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"freeze": ("querry",)},
            "--freeze querry: no parameter has this role or name; did you mean query",
        ),
        ({"freeze": ("block.atention.key",)}, "did you mean block.attention.key"),
        ({"freeze": ("bias", "block.nothing.*")}, "--freeze block.nothing.*: no parameter"),
        ({"train_only": ("head",)}, "--train-only head: no parameter has this role or name"),
        (
            {"train_only": ("query",), "freeze": ("*",)},
            "--freeze and --train-only leave no parameter to train",
        ),
    ],
)
def test_a_pattern_that_means_nothing_is_an_error(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        assemble(config(**flags), jax.devices()[:1])
    assert message in str(error.value)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parameters_stay_to_the_last_bit_and_have_no_optimizer_state(optimizer: str) -> None:
    settings = dataclasses.replace(WHOLE.optimizer, name=optimizer)
    program, (start, *_, end), _ = trained(config(freeze=FROZEN, optimizer=settings))
    assert end.ema is not None
    for name, w in start.params.items():
        assert np.array_equal(end.params[name], w) == (name in NAMES), name
        assert np.array_equal(end.ema[name], w) == (name in NAMES), name
    held = {
        getattr(path[-1], "key", None)
        for path, _ in jax.tree_util.tree_leaves_with_path(program.abstract.opt_state)
    }
    assert not held & NAMES
    assert program.trained & held == program.trained


def test_the_first_step_of_the_others_is_as_without_freezing() -> None:
    some, every = trained(config(freeze=FROZEN)), trained(config())
    for name in SPECS.keys() - NAMES:
        np.testing.assert_allclose(
            some.states[1].params[name], every.states[1].params[name], rtol=1e-5, atol=1e-7
        )
    assert some.first["loss"] == pytest.approx(every.first["loss"], rel=1e-6)


def test_the_gradient_norm_is_that_of_what_is_trained() -> None:
    some, every = trained(config(freeze=FROZEN)).first, trained(config()).first
    squares = dict(zip(SPECS, every["squares"], strict=True))  # one layer, so one per parameter
    assert every["grad_norm"] == pytest.approx(np.sqrt(sum(squares.values())), rel=1e-5)
    norm = np.sqrt(sum(square for name, square in squares.items() if name not in NAMES))
    assert some["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm < 0.99 * every["grad_norm"]


def test_no_gradient_of_a_frozen_matrix_is_computed() -> None:
    """Products of the compiled step: all frozen but the readout leaves one of the backward pass."""

    def dots(run: Config) -> int:
        return str(assemble(run, jax.devices()[:1]).trace_train().jaxpr).count("dot_general")

    assert dots(config(train_only=("readout",))) < 0.6 * dots(config())


def test_a_run_shows_what_it_trains_and_goes_on_only_with_that(folder: Path) -> None:
    words = "--optimizer.schedule constant --log.no-tensorboard --steps 2 --workdir out"
    frozen = "--freeze token_embedding block.mlp.*"
    shown = train(words, "--dry-run", frozen)
    assert shown.code == 0, shown.err
    assert not shown.err
    lines = {line.split()[0]: line.rstrip() for line in shown.out.splitlines() if line.strip()}
    for name in ("token", "block.mlp.up", "block.mlp.down"):
        assert lines[name].endswith("frozen")
    assert not lines["block.attention.query"].endswith("frozen")
    assert "of them frozen" in shown.out

    done = train(words, frozen)
    assert done.code == 0, done.err
    assert not done.err
    assert " frozen) under mup" in done.out
    assert record_of("out")["config"]["freeze"] == ["token_embedding", "block.mlp.*"]
    resumed = train(words, "--steps 4 --resume")
    assert resumed.code == 2
    message = "the run in out has freeze token_embedding block.mlp.*, not nothing"
    assert f"{message}; continue it with --freeze token_" in resumed.err
    misspelt = train("--workdir other --freeze tokens")
    assert misspelt.code == 2
    message = "--freeze tokens: no parameter has this role or name; did you mean token"
    assert message in misspelt.err
