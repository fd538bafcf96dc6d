"""Contract of every row of the table of optimizers. A new row is tested without an edit; one unlike Adam is among them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mupax import presets
from mupax.presets import ParamSpec, Role
from mupax.presets.optimizers import OPTIMIZERS, Optimizer
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import guards
from mupax.train.core.factors import Factors, hyperparams, resolve
from mupax.train.core.optimizer import build, rows
from mupax.train.core.state import TrainState
from mupax.train.reuse import transplant
from mupax.train.reuse.forms import convert
from mupax.zoo.configs import CONFIGS, ConfigError
from mupax.zoo.definition import Arrays, definition
from tests.fixtures import optimizers

pytestmark = pytest.mark.core

SMALL = dataclasses.replace(
    CONFIGS["lm-tiny"], width=12, num_heads=3, depth=2, vocab_size=11, seq_len=5
)
BASE = dataclasses.replace(SMALL, width=8, num_heads=2).base_sizes()
MODEL = definition(SMALL)
STEPS = 5


@pytest.fixture(params=[*OPTIMIZERS, optimizers.NAME])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an optimizer of the table, or of one that a user adds to it."""
    monkeypatch.setitem(OPTIMIZERS, optimizers.NAME, optimizers.ADOPT)
    return request.param


def row_of(name: str) -> Optimizer:
    return OPTIMIZERS[name]


def config_of(name: str, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(
        **{"name": name, "peak_lr": 0.1, "schedule": "constant", "eps": 1e-3, **changes}
    )


SHAPES = {"table": (7, 4), "matrix": (4, 6), "gain": (4,)}
SPECS = {
    "table": ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed"), fan_in=("vocab",)),
    "matrix": ParamSpec(role=Role.HIDDEN, axes=("embed", "mlp"), fan_in=("embed",), in_block=True),
    "gain": ParamSpec(role=Role.NORM_GAIN, axes=("embed",)),
}


def gradients(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def steps(config: OptimizerConfig, scale: float = 1.0) -> list[tuple[Arrays, Any]]:
    """Return parameters and optimizer state before the first step and after every one, with factors of 1.

    Args:
        config: the optimizer.
        scale: multiplies every gradient.
    """
    tx = build(config, SPECS)
    numbers = hyperparams(config, STEPS).at(jnp.int32(0))
    ones = dict.fromkeys(SPECS, np.array(1, np.float32))
    factors = Factors(ones, ones, ones, ones, {})

    @jax.jit
    def update(grads: Arrays, state: Any, params: Arrays) -> tuple[Arrays, Any]:
        updates, state = tx.update(grads, state, params, factors=factors, hyper=numbers)
        moved: Any = optax.apply_updates(params, updates)
        return moved, state

    params: Arrays = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    history: list[tuple[Arrays, Any]] = [(params, tx.init(params))]
    for step in range(STEPS):
        grads = {name: scale * gradient for name, gradient in gradients(step).items()}
        history.append(update(grads, history[-1][1], history[-1][0]))
    return history


def size(tree: Arrays) -> float:
    return float(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)))


def test_the_first_updates_that_move_nothing_are_counted(name: str) -> None:
    history = steps(config_of(name))
    moved = [
        size(jax.tree.map(jnp.subtract, after[0], before[0]))
        for before, after in itertools.pairwise(history)
    ]
    still = row_of(name).still_steps
    assert moved[:still] == [0] * still
    assert all(distance > 0 for distance in moved[still:])


def test_moments_are_the_powers_of_the_gradient_that_the_row_says(name: str) -> None:
    """Gradients four times as large: a power of two, so that the means round alike."""
    config = config_of(name, eps=0.0)
    _, state = steps(config)[-1]
    _, state_of_larger = steps(config, scale=4.0)[-1]
    assert row_of(name).moments
    for field, power in row_of(name).moments.items():
        moments = optax.tree.get(state, field)
        larger = optax.tree.get(state_of_larger, field)
        assert set(moments) == set(SPECS)
        for small, large in zip(jax.tree.leaves(moments), jax.tree.leaves(larger), strict=True):
            np.testing.assert_allclose(np.asarray(large), np.asarray(small) * 4.0**power, rtol=1e-5)


def test_the_first_moment_alone_is_stored_in_bfloat16(name: str) -> None:
    row = row_of(name)
    if row.first_moment is None:
        with pytest.raises(ConfigError, match="moment_dtype"):
            config_of(name, moment_dtype="bfloat16")
        return
    for _, state in steps(config_of(name, moment_dtype="bfloat16")):
        for field in row.moments:
            dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(optax.tree.get(state, field))}
            assert dtypes <= {"bfloat16" if field == row.first_moment else "float32"}


def test_a_state_without_the_moment_refuses_to_store_it_in_bfloat16() -> None:
    tx = build(config_of("sgd", momentum=0.0, moment_dtype="bfloat16"), {})
    with pytest.raises(ConfigError, match="has no trace to keep in it"):
        tx.init({})


def test_the_fields_that_the_row_says_it_reads_are_those_that_change_an_update(name: str) -> None:
    changes: dict[str, Any] = {
        "b1": 0.5,
        "b2": 0.5,
        "eps": 0.5,
        "momentum": 0.5,
        "weight_decay": 0.5,
    }

    plain, _ = steps(config_of(name))[-1]
    for field, value in changes.items():
        changed, _ = steps(config_of(name, **{field: value}))[-1]
        differs = size(jax.tree.map(jnp.subtract, changed, plain)) > 0
        assert differs == (field in row_of(name).reads), field


@pytest.mark.parametrize("form", ["mean-field", "plain"])
def test_forms_of_a_preset_are_one_parameterization(name: str, form: Any) -> None:
    """Weights times their multipliers move alike in two forms: the chain rule gives the gradients of one from the other's."""
    before = presets.get("mup", base=BASE)
    after = before.with_form(form)
    factors = [resolve(preset, MODEL, name) for preset in (before, after)]
    config = config_of(name)
    tx = build(config, MODEL.specs)
    numbers = hyperparams(config, STEPS).at(jnp.int32(0))
    shapes = {parameter: leaf.shape for parameter, leaf in MODEL.abstract.items()}
    params: Arrays = {parameter: jnp.ones(shape) for parameter, shape in shapes.items()}
    start = TrainState(jnp.int32(0), params, tx.init(params))
    states = [start, convert(start, MODEL, before, after, name)]

    @jax.jit
    def update(grads: Arrays, state: Any, params: Arrays, factors: Factors) -> tuple[Arrays, Any]:
        updates, state = tx.update(grads, state, params, factors=factors, hyper=numbers)
        moved: Any = optax.apply_updates(params, updates)
        return moved, state

    ends = []
    for state, of_form in zip(states, factors, strict=True):
        moved, opt_state = state.params, state.opt_state
        for step in range(STEPS):
            grads = {
                n: g * rows(of_form.multiplier[n], g) for n, g in gradients(step, shapes).items()
            }
            moved, opt_state = update(grads, opt_state, moved, of_form)
        ends.append({n: w * rows(of_form.multiplier[n], w) for n, w in moved.items()})
    assert any(np.any(factors[0].multiplier[n] != factors[1].multiplier[n]) for n in params)
    for parameter in params:
        np.testing.assert_allclose(ends[0][parameter], ends[1][parameter], rtol=2e-4, atol=1e-6)


def test_a_chain_of_the_row_is_what_the_preset_asks_for(name: str) -> None:
    preset = presets.get("mup", base=BASE)
    factors = resolve(preset, MODEL, name)
    config = config_of(name, peak_lr=1.0, eps=1e-8, weight_decay=0.1)
    chain = build(config, MODEL.specs)
    numbers = hyperparams(config, 1).at(jnp.int32(0))

    def with_rates(rates: Factors) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return chain.update(updates, state, params, factors=rates, hyper=numbers)

        return optax.GradientTransformation(chain.init, update)

    guards.check_chain(with_rates(factors), MODEL, preset, name)
    wrong = factors._replace(lr={**factors.lr, "readout": 2 * factors.lr["readout"]})
    with pytest.raises(presets.PresetError, match="readout"):
        guards.check_chain(with_rates(wrong), MODEL, preset, name)


def test_new_entries_among_old_ones_move_as_far_as_the_row_lets_them(name: str) -> None:
    config = config_of(name, eps=1e-8, b2=0.999)
    expected = 6.5 if "nu" in row_of(name).moments and row_of(name).still_steps == 0 else None
    if expected is None:
        assert np.isfinite(transplant.overshoot(config))
    else:
        assert transplant.overshoot(config) == pytest.approx(expected, rel=0.05)
