"""The optimizer chain against optax's own where all factors are one, its clipping, and its schedules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mupax.presets import ParamSpec, Role
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import Factors, hyperparams, schedule_table


def rows_of_ones(specs: dict[str, bool]) -> Factors:
    """Factors of one; decay only where the specs say so."""
    ones = dict.fromkeys(specs, np.array(1, np.float32))
    return Factors(
        ones, ones, ones, {n: np.array(decays, np.float32) for n, decays in specs.items()}, {}
    )


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (OptimizerConfig(weight_decay=0.2), lambda lr, mask: optax.adamw(lr, b2=0.95, weight_decay=0.2, mask=mask)),
        (OptimizerConfig(name="adam", b1=0.8, b2=0.7, eps=0.1), lambda lr, mask: optax.adam(lr, 0.8, 0.7, 0.1)),
        (OptimizerConfig(name="sgd", momentum=0.7), lambda lr, mask: optax.sgd(lr, 0.7)),
        (OptimizerConfig(name="momentum", momentum=0.7), lambda lr, mask: optax.sgd(lr, 0.7)),
        (
            OptimizerConfig(name="sgd", weight_decay=0.2, clip_norm=0.5),
            lambda lr, mask: optax.chain(
                optax.clip_by_global_norm(0.5), optax.trace(0.9), optax.add_decayed_weights(0.2, mask), optax.scale_by_learning_rate(lr)
            ),
        ),
    ],
    ids=["adamw", "adam", "sgd", "momentum", "clipped"],
)  # fmt: skip
@pytest.mark.core
def test_at_base_size_the_chain_is_optax(
    config: OptimizerConfig, reference: Callable[..., Any]
) -> None:
    config = dataclasses.replace(config, peak_lr=0.1, schedule="linear", warmup_steps=2)
    mask, random = {"a": True, "b": False}, np.random.default_rng(0)
    ours, theirs = (
        optimizer.build(config, {}),
        reference(lambda step: jnp.asarray([0.05, 0.1, 0.1, 0.2 / 3, 0.1 / 3])[step], mask),
    )
    numbers, factors = hyperparams(config, 5), rows_of_ones(mask)
    params = {n: random.standard_normal((3, 5)).astype(np.float32) for n in mask}
    states: list[Any] = [ours.init(params), theirs.init(params)]
    at: list[Any] = [params, params]
    for step in range(5):
        grads = {n: random.standard_normal((3, 5)).astype(np.float32) for n in mask}
        updates, states[0] = ours.update(
            grads, states[0], at[0], factors=factors, hyper=numbers.at(jnp.int32(step))
        )
        at[0] = optax.apply_updates(at[0], updates)
        updates, states[1] = theirs.update(grads, states[1], at[1])
        at[1] = optax.apply_updates(at[1], updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *at)


@pytest.mark.core
@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.first_moment])
def test_first_moments_may_be_stored_in_bfloat16_and_are_summed_in_float32(name: str) -> None:
    moment = OPTIMIZERS[name].first_moment or ""
    specs = {
        "a": ParamSpec(role=Role.HIDDEN, axes=("embed", "mlp"), fan_in=("embed",), in_block=True)
    }
    plain, stored = (
        optimizer.build(OptimizerConfig(name=name, peak_lr=0.1, moment_dtype=d), specs)
        for d in (None, "bfloat16")
    )
    random, extra = np.random.default_rng(0), {"factors": rows_of_ones({"a": True})}
    params, *grads = (
        {"a": jnp.asarray(random.standard_normal((3, 5)), jnp.float32)} for _ in range(3)
    )
    numbers = hyperparams(OptimizerConfig(peak_lr=0.1), 5).at(jnp.int32(2))

    def to(state: Any, dtype: str) -> Any:
        return optax.tree.set(
            state, **{moment: optax.tree.cast(optax.tree.get(state, moment), dtype)}
        )

    updates: Any
    rounded: Any
    other: Any
    exact = plain.update(grads[0], plain.init(params), params, hyper=numbers, **extra)[1]
    updates, rounded = stored.update(grads[0], stored.init(params), params, hyper=numbers, **extra)
    chex.assert_trees_all_equal(rounded, to(exact, "bfloat16"))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(rounded)} - {"int32", "float32"} == {
        "bfloat16"
    }
    assert name != "adamw" or rounded[1].nu["a"].dtype == jnp.float32
    updates, after = stored.update(grads[1], rounded, params, hyper=numbers, **extra)
    expected, wide = plain.update(grads[1], to(rounded, "float32"), params, hyper=numbers, **extra)
    chex.assert_trees_all_equal((updates, after), (expected, to(wide, "bfloat16")))
    if name != "lion":  # the control: it is rounded; Lion takes signs
        other, _ = plain.update(grads[1], exact, params, hyper=numbers, **extra)
        assert (np.asarray(other["a"]) != np.asarray(updates["a"])).any()


@pytest.mark.core
def test_clipping_is_global_and_before_every_factor() -> None:
    config = OptimizerConfig(name="sgd", peak_lr=1.0, schedule="constant", clip_norm=2.0)
    tx, numbers = optimizer.build(config, {}), hyperparams(config, 3).at(jnp.int32(0))
    updates: Any
    factors = rows_of_ones({"a": True, "b": True})._replace(
        lr={"a": np.array(100, np.float32), "b": np.array(1, np.float32)}
    )
    grads = {"a": jnp.full((3,), 4.0), "b": jnp.full((4,), 6.0)}
    params = jax.tree.map(jnp.zeros_like, grads)
    updates, _ = tx.update(grads, tx.init(params), params, factors=factors, hyper=numbers)
    norm = math.sqrt(3 * 16 + 4 * 36)
    np.testing.assert_allclose(updates["a"], -100 * 4 * 2 / norm, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], -6 * 2 / norm, rtol=1e-6)
    small = jax.tree.map(lambda g: g / norm, grads)
    updates, _ = tx.update(small, tx.init(params), params, factors=factors, hyper=numbers)
    np.testing.assert_allclose(updates["b"], -6 / norm, rtol=1e-6)


@pytest.mark.core
def test_schedules_equal_their_formulas() -> None:
    def table(**settings: Any) -> np.ndarray:
        return schedule_table(OptimizerConfig(**settings), 11)

    ramp, t = np.array([1, 2, 3]) / 3, np.arange(8) / 8
    np.testing.assert_allclose(
        table(schedule="constant", warmup_steps=3), [*ramp, *np.ones(8)], rtol=1e-6
    )
    np.testing.assert_allclose(
        table(schedule="cosine", warmup_steps=3, final_lr_fraction=0.2),
        [*ramp, *(0.2 + 0.4 * (1 + np.cos(np.pi * t)))],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        table(schedule="linear", warmup_steps=3, final_lr_fraction=0.2),
        [*ramp, *(1 - 0.8 * t)],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        table(schedule="wsd", warmup_steps=3, decay_steps=4),
        [*ramp, *np.ones(4), 1, 0.75, 0.5, 0.25],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        table(schedule="cosine", warmup_steps=40), (1 + np.arange(11)) / 11, rtol=1e-6
    )
    from_zero = table(schedule="linear", warmup_steps=3, warmup_from_zero=True)
    np.testing.assert_allclose(from_zero, [0, 1 / 3, 2 / 3, *(1 - t)], rtol=1e-5)
    assert table().dtype == np.float32
    for name in ("constant", "cosine", "linear", "wsd"):
        assert table(schedule=name).shape == (11,)


def test_steps_after_the_end_keep_the_last_rate() -> None:
    numbers = hyperparams(OptimizerConfig(schedule="linear", final_lr_fraction=0.5), 4)
    assert (
        float(numbers.at(jnp.int32(3)).schedule)
        == float(numbers.at(jnp.int32(9)).schedule)
        == 0.625
    )


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_runs_of_other_lengths_are_one_program(schedule: Any) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_steps=3)
    tables = {steps: hyperparams(config, steps).schedule for steps in (2, 5, 1024, 1025)}
    assert [len(table) for table in tables.values()] == [1024, 1024, 1024, 2048]
    for steps, table in tables.items():
        assert table[:steps].tobytes() == schedule_table(config, steps).tobytes()
        assert np.all(table[steps:] == table[steps - 1])
