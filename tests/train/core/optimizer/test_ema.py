"""The moving average of parameters: its formula, that it changes no step, and that a run keeps, saves and evaluates it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.run import Config, EmaConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import TrainState, averaged
from mupax.train.reuse.forms import convert
from mupax.zoo.configs import ComputeConfig, ConfigError, DecoderConfig
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import evaluations, folder, train
from tests.fixtures.tiny import batch_of, run_of
from tests.fixtures.xla import FUSIONS_OF_USERS

__all__ = ["folder", "shared_programs"]  # fixtures

DECODER = DecoderConfig(width=16, depth=1, num_heads=4, mlp_ratio=1.5, vocab_size=16, seq_len=7)
OFF = run_of(
    DECODER,
    preset=PresetConfig(name="mup", base="lm-proxy"),
    optimizer=OptimizerConfig(peak_lr=0.02),
)
ON = dataclasses.replace(OFF, ema=EmaConfig(decay=0.3))


def program_of(config: Config) -> Program:
    return assemble(config, jax.devices()[:1])


@functools.cache
def trained(config: Config) -> list[TrainState]:
    """States 0 to 3, whole on the host."""
    program = program_of(config)
    step = program.trace_train().lower().compile(compiler_options={**FUSIONS_OF_USERS})
    state = program.initial_state()
    states = [jax.device_get(state)]
    for seed in range(3):
        batch = program.train_feed().shard_batch(batch_of(DECODER, seed=seed))
        state, _ = step(state, program.step_inputs(), batch)
        states.append(jax.device_get(state))
    return states


@pytest.mark.core
def test_the_average_is_that_of_the_formula_and_changes_no_step() -> None:
    without, states = (trained(config) for config in (OFF, ON))
    want = states[0].params
    for step, (plain, state) in enumerate(zip(without[1:], states[1:], strict=True)):
        decay = min(0.3, (1 + step) / (10 + step))
        want = {name: decay * w + (1 - decay) * state.params[name] for name, w in want.items()}
        assert state.ema is not None
        for name, w in want.items():
            np.testing.assert_array_equal(plain.params[name], state.params[name])
            np.testing.assert_allclose(state.ema[name], w, rtol=1e-5, atol=1e-7)
    assert without[-1].ema is None
    assert any(np.abs(w - want[name]).max() > 1e-3 for name, w in states[-1].params.items())


@pytest.mark.core
def test_the_decay_warms_up_and_a_parameter_that_stands_still_is_its_average() -> None:
    still, ones = {"w": jnp.float32(1 / 3)}, {"w": jnp.float32(1)}
    for step, decay in ((0, 1 / 10), (1, 2 / 11), (90, 91 / 100), (8990, 0.999), (10**6, 0.999)):
        moved = averaged({"w": jnp.float32(0)}, ones, jnp.float32(0.999), jnp.int32(step))
        assert float(moved["w"]) == pytest.approx(1 - decay, rel=1e-4)
        assert averaged(still, still, jnp.float32(0.999), jnp.int32(step))["w"] == still["w"]


def test_the_average_is_float32_and_lies_where_its_parameter_does() -> None:
    stored = dataclasses.replace(DECODER, compute=ComputeConfig(param_dtype="bfloat16"))
    program = assemble(
        dataclasses.replace(ON, model=stored, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    )
    state = program.initial_state()
    assert state.ema is not None
    assert any(not w.sharding.is_fully_replicated for w in state.ema.values())
    for name, w in state.params.items():
        assert (w.dtype, state.ema[name].dtype) == (jnp.bfloat16, jnp.float32)
        assert state.ema[name].sharding == w.sharding
    program.compile_eval()  # takes the average's type


def test_an_average_moves_to_another_form_as_its_parameters_do() -> None:
    program = program_of(ON)
    other = program_of(
        dataclasses.replace(ON, preset=dataclasses.replace(ON.preset, form="mean-field"))
    )
    state = trained(ON)[-1]
    moved = convert(state, program.definition, program.preset, other.preset, "adamw")
    assert state.ema is not None
    assert moved.ema is not None
    ratios = {
        name: np.unique(np.round(np.asarray(moved.params[name]) / w, 4))
        for name, w in state.params.items()
        if w.all()
    }
    assert any(not np.allclose(ratio, 1) for ratio in ratios.values())
    for name, ratio in ratios.items():
        np.testing.assert_allclose(moved.ema[name], state.ema[name] * ratio[0], rtol=1e-3)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"ema.decay is .*; write a number in \(0, 1\), or None"):
        EmaConfig(decay=decay)


def saved(checkpoint: Path) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    stored: Any = ocp.metadata(str(checkpoint)).metadata
    return dict(
        ocp.load(
            str(checkpoint), jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), stored)
        )
    )


def test_a_run_saves_evaluates_and_resumes_its_average(folder: Path) -> None:
    words = "--ema.decay 0.9 --optimizer.schedule constant --steps 6 --log.eval-every-steps 3"
    done = train(words, "--workdir whole")
    assert (done.code, done.err) == (0, "")
    assert done.out.count("(ema weights)") == 2
    assert [row["eval_weights"] for row in evaluations("whole")] == ["ema", "ema"]
    for flags in ("--steps 4", "--resume"):
        assert train(words, "--workdir parts", flags).code == 0
    one, other = (saved(folder / name / "checkpoints" / "6") for name in ("parts", "whole"))
    assert {"params", "ema", "opt_state"} < one.keys()
    jax.tree.map(np.testing.assert_array_equal, one, other)

    done = train("--workdir whole --resume")
    assert done.code == 2
    message = "the run in whole has ema.decay 0.9, not None; continue it with --ema.decay 0.9"
    assert message in done.err
