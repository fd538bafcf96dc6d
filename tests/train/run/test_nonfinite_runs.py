"""Steps whose numbers are not finite, and losses that are spikes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.run import Config, DataConfig, FaultsConfig, MeshConfig, PresetConfig
from mupax.train.core import state as bad_numbers
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import SPIKE_WARM_UP, Health, Limits
from mupax.zoo.configs import ConfigError, DecoderConfig

# One step


CONFIG = Config(
    recipe="tiny", data=DataConfig(name="text:x", batch_size=4), mesh=MeshConfig(data=1), steps=9, accumulation_steps=2,
    model=DecoderConfig(width=12, depth=3, num_heads=3, vocab_size=11, seq_len=5), preset=PresetConfig(name="mup"),
)  # fmt: skip


PARTS = ("params", "opt_state", "ema")


@pytest.fixture(scope="module")
def program_and_step() -> tuple[Program, Any]:
    config = dataclasses.replace(CONFIG, ema=dataclasses.replace(CONFIG.ema, decay=0.5))
    program = assemble(config, jax.devices()[:1])
    return program, program.compile_train()


def batch_of(weight: float = 1.0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    inputs, targets = (draw.integers(0, 11, (4, 5), np.int32) for _ in range(2))
    weights = np.ones((4, 5), np.float32)
    weights[2, 3] = weight
    return {"inputs": inputs, "targets": targets, "weights": weights}


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.array, tree)


def same(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.core
def test_a_bad_step_moves_nothing_but_the_step_and_the_counters(
    program_and_step: tuple[Program, Any],
) -> None:
    program, step = program_and_step
    state, numbers = program.initial_state(), program.step_inputs()
    state, _ = step(state, numbers, batch_of())
    before = copied(state)
    for count in (1, 2):
        state, metrics = step(state, numbers, batch_of(np.nan))
        assert metrics["verdict"].tolist() == [1, 0, count]
        assert int(state.step) == 1 + count
        assert (int(state.health.skipped), int(state.health.in_a_row)) == (count, count)
        for part in PARTS:
            assert same(getattr(state, part), getattr(before, part))
        assert np.isfinite(state.health.mean)
    # As if the bad steps had not been, but for the schedule.
    state, metrics = step(state, numbers, batch_of())
    assert metrics["verdict"].tolist() == [0, 0, 0]
    assert (int(state.health.skipped), int(state.health.in_a_row)) == (2, 0)
    for part in PARTS:  # control: a good step does move them
        assert not same(getattr(state, part), getattr(before, part))


@pytest.mark.core
def test_the_first_parameter_is_named_with_its_role_and_layer(
    program_and_step: tuple[Program, Any],
) -> None:
    program, step = program_and_step
    specs, shapes = program.definition.specs, program.definition.abstract
    _, metrics = step(program.initial_state(), program.step_inputs(), batch_of())
    squares = np.array(metrics["squares"])
    assert np.sqrt(squares.sum()) == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)
    assert bad_numbers.culprit(squares, specs, shapes) is None
    names = list(specs)
    stacked = next(name for name in names if specs[name].axes[0] == "layers")
    at = sum(3 if specs[name].axes[0] == "layers" else 1 for name in names[: names.index(stacked)])
    squares[at + 2] = np.inf
    role = specs[stacked].role.value
    first = f"{stacked} (role {role}, layer 2)"
    assert bad_numbers.culprit(squares, specs, shapes) == first
    squares[-1] = np.nan
    more = f"{first}, the first of 2 parameters of {len(names)}"
    assert bad_numbers.culprit(squares, specs, shapes) == more


# Spikes


def judged(losses: list[float], limits: Limits) -> tuple[list[bool], list[bool], Health]:
    judge, health, keeps, spikes = jax.jit(bad_numbers.check_step), Health(), [], []
    for loss in losses:
        keep, spike, health = judge(health, limits, np.float32(loss), np.float32(1))
        keeps.append(bool(keep))
        spikes.append(bool(spike))
    return keeps, spikes, health


@pytest.mark.core
def test_a_loss_far_above_the_running_mean_is_a_spike_and_is_skipped_on_request() -> None:
    draw = np.random.default_rng(0)
    plain = (3 + 0.1 * draw.standard_normal(SPIKE_WARM_UP + 100)).tolist()
    losses = [9.0, *plain, 9.0, *plain[:20], 9.0]
    keeps, spikes, health = judged(losses, Limits(np.float32(6), np.bool_(False)))
    assert [index for index, spike in enumerate(spikes) if spike] == [
        len(plain) + 1,
        len(losses) - 1,
    ]
    assert all(keeps)
    assert (int(health.spikes), int(health.skipped)) == (2, 0)
    keeps, again, health = judged(losses, Limits(np.float32(6), np.bool_(True)))
    assert again == spikes
    assert keeps == [not spike for spike in spikes]
    assert int(health.skipped) == 2
    assert not any(judged(losses, Limits())[1])  # control: no bound, no spike


@pytest.mark.core
def test_mean_and_variance_are_those_of_the_losses_and_a_lasting_rise_is_no_spike_for_long() -> (
    None
):
    draw = np.random.default_rng(1)
    losses = draw.normal(2, 0.3, SPIKE_WARM_UP).tolist()
    health = judged([*losses[:20], float("nan"), *losses[20:]], Limits(np.float32(6)))[2]
    assert float(health.mean) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(health.variance) == pytest.approx(np.var(losses), rel=1e-4)
    assert int(health.seen) == len(losses)
    spikes = judged([*losses, *[6.0] * 60], Limits(np.float32(6)))[1]
    assert spikes[len(losses)]
    assert 0 < sum(spikes) < 30
    assert not spikes[-1]


@pytest.mark.core
def test_values_of_the_policy_are_checked() -> None:
    with pytest.raises(
        ConfigError, match=r"faults.bad_numbers is 'ignore'; write raise, skip, rollback"
    ):
        FaultsConfig(bad_numbers="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"skip_spikes needs faults.spike_deviations"):
        FaultsConfig(spike_deviations=None, skip_spikes=True)
