"""A preset costs nothing by the compiler's count, against optax.adamw without factors.

How long both take is measured by `python -m scripts.bench.step.preset_cost`; here nothing is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.core.program import Program, assemble
from mupax.train.core.step import trace_train_step
from scripts.bench.step import preset_cost

FLOPS = 1.002
BYTES = 1.015
"""Largest cost of a preset's step over one without: 1.0009 and 1.010 were measured."""
WIDTH = 64
DEPTH = 2


@functools.cache
def program(preset: str) -> Program:
    return assemble(preset_cost.config_of(WIDTH, DEPTH, 8, preset), jax.devices()[:1])


@functools.cache
def with_preset() -> jax.stages.Compiled:
    """Return the step of every preset, whose factors are data."""
    return preset_cost.with_preset(program("depth-mup"))


@functools.cache
def without_factors() -> jax.stages.Compiled:
    return preset_cost.without_factors(program("depth-mup"))


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Compiler's counts of the step with a preset over those of the step without."""
    ours = with_preset()
    plain = without_factors()
    monkeypatch.setattr(preset_cost, "with_preset", lambda _: ours)
    monkeypatch.setattr(preset_cost, "without_factors", lambda _: plain)
    return preset_cost.ratios(program("depth-mup"))


@pytest.mark.core
def test_a_preset_adds_no_operations_and_moves_no_more_memory(ratios: dict[str, float]) -> None:
    # It does take part: one product per parameter at least.
    assert 1 < ratios["flops"] < FLOPS
    assert ratios["bytes"] < BYTES


def test_the_baseline_trains_as_the_run_does_where_every_factor_is_one() -> None:
    run_program = program("sp")
    config = run_program.config
    np.testing.assert_allclose(run_program.inputs.factors.multiplier["readout"], 1.0)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 257), np.int32)
    batch: Any = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((8, 256), np.float32),
    }
    state = run_program.initial_state()
    params = jax.tree.map(jnp.array, state.params)
    table = preset_cost.schedule_table(config.optimizer, config.steps)
    opt_state = preset_cost.plain_adamw(run_program, table).init(params)
    for _ in range(2):
        state, metrics = with_preset()(state, run_program.step_inputs(), batch)
        params, opt_state, plain_metrics = without_factors()(params, opt_state, batch)
        assert {n: float(metrics[n]) for n in plain_metrics} == pytest.approx(
            {n: float(v) for n, v in plain_metrics.items()}, rel=1e-4
        )


@pytest.mark.tpu
def test_a_preset_costs_nothing_on_tpu() -> None:
    run_program = preset_cost.on_chip("v5e:2x2", 256, 2, 8)
    ours, folded = (
        preset_cost.counted(make(run_program))
        for make in (preset_cost.with_preset, preset_cost.folded)
    )
    assert 1 < ours["flops"] / folded["flops"] < 1.005
    assert 0.995 < ours["bytes"] / folded["bytes"] < 1.005
    # Control: a skip that is data is seen by its memory traffic.
    skip = {"block.skip": np.ones((2, 2), np.float32)}
    factors = run_program.inputs.factors._replace(
        forward={**run_program.inputs.factors.forward, **skip}
    )
    changed = dataclasses.replace(run_program, inputs=run_program.inputs._replace(factors=factors))
    assert preset_cost.counted(changed.compile_train())["bytes"] / folded["bytes"] > 1.015


def test_control_one_product_over_activations_is_seen() -> None:
    # The skip as data, as a preset with another skip has it: the count is fine enough to see it.
    run_program = program("depth-mup")
    skip = {"block.skip": np.ones((DEPTH, 2), np.float32)}
    factors = run_program.inputs.factors
    factors = factors._replace(forward={**factors.forward, **skip})
    traced = trace_train_step(
        run_program.definition,
        run_program.tx,
        run_program.abstract,
        run_program.layout,
        run_program.inputs._replace(factors=factors),
        preset_cost.abstract_batch(run_program.config.model, 8),
    )
    changed = preset_cost.counted(traced.lower().compile())
    plain_counts = preset_cost.counted(with_preset())
    assert changed["flops"] > FLOPS * plain_counts["flops"]
    assert changed["bytes"] > BYTES * plain_counts["bytes"]
