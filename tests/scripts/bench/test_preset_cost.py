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

FLOPS = 1.005
BYTES = 1.03
"""Largest cost of a preset's step over one without: 1.0003 and 0.98 were measured."""


@functools.cache
def program(width: int, depth: int, preset: str) -> Program:
    return assemble(preset_cost.config_of(width, depth, 8, preset), jax.devices()[:1])


@functools.cache
def measured() -> dict[str, float]:
    return preset_cost.ratios(program(256, 4, "depth-mup"))


@pytest.mark.core
def test_a_preset_adds_no_operations() -> None:
    assert measured()["flops"] < FLOPS
    # It does take part: one product per parameter at least.
    assert measured()["flops"] > 1


@pytest.mark.core
def test_a_preset_moves_no_more_memory() -> None:
    assert measured()["bytes"] < BYTES


def test_the_baseline_trains_as_the_run_does_at_base_size() -> None:
    # Where every factor is one, the two steps give the same values.
    config = preset_cost.config_of(64, 2, 8, "sp")
    run_program = assemble(config, jax.devices()[:1])
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
    ours = preset_cost.with_preset(run_program)
    plain = preset_cost.without_factors(run_program)
    for _ in range(3):
        state, metrics = ours(state, run_program.step_inputs(), batch)
        params, opt_state, plain_metrics = plain(params, opt_state, batch)
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
    run_program = program(256, 4, "depth-mup")
    skip = {"block.skip": np.ones((4, 2), np.float32)}
    run = run_program.inputs._replace(
        factors=run_program.inputs.factors._replace(
            forward={**run_program.inputs.factors.forward, **skip}
        )
    )
    batch = preset_cost.abstract_batch(run_program.config.model, 8)
    compiled = (
        trace_train_step(
            run_program.definition,
            run_program.tx,
            run_program.abstract,
            run_program.layout,
            run,
            batch,
        )
        .lower()
        .compile()
    )
    changed = preset_cost.counted(compiled)
    plain_counts = preset_cost.counted(preset_cost.with_preset(run_program))
    assert changed["flops"] > 1.001 * plain_counts["flops"]
    assert changed["bytes"] > 1.03 * plain_counts["bytes"]
