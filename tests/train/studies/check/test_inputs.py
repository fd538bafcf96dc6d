"""Coordinate check on 2,048 evenly drawn tokens with random targets, as a user's first batch is."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from mupax import presets
from mupax.presets import Preset
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors, step
from mupax.train.studies.check import check, theory
from mupax.train.studies.check.judge import Finding
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import definition, normals
from scripts.check.mutants import Mutant

VOCAB = 160
CONTEXT = 8
SEQUENCES = 256
SEEDS = 3
MODEL = DecoderConfig(
    width=32,
    depth=1,
    num_heads=2,
    vocab_size=VOCAB,
    seq_len=CONTEXT,
    positions="rotary",
    norm="rmsnorm",
    bias=False,
    mlp_ratio=2,
    compute=ComputeConfig(layers="scan"),
)
RIGHT = presets.get("mup", base=MODEL.base_sizes())
GAIN = "norm.gain"


def batch() -> dict[str, Any]:
    """Return a batch that never reads a tenth of the vocabulary."""
    rng = np.random.default_rng(0)
    shape = (SEQUENCES, CONTEXT)
    inputs = rng.integers(0, VOCAB * 9 // 10, shape).astype(np.int32)
    targets = rng.integers(0, VOCAB, shape).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(shape, np.float32)}


@functools.cache
def series() -> check.Series:
    """Return narrow models at two sizes, which compile once."""
    keeps = {"width", "num_heads", "depth", "vocab_size", "seq_len", "mlp_ratio"}
    first, _, last = check.grow(MODEL, "heads", 3, keeps)
    adam = OptimizerConfig(
        name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
    )
    return check.Series([definition(first), definition(last)], adam, 1)


def judged(measured: dict[str, np.ndarray]) -> dict[str, Finding]:
    """Judge observables of a program by the theory of the right rules."""
    first, last = series().definitions
    expected = theory.of(RIGHT, first, last, "adam")
    findings = check.judge(measured, [1.0, 4.0], expected)
    return {f"{finding.observable} @{finding.step}": finding for finding in findings}


def trained(preset: Preset) -> dict[str, Finding]:
    return judged(series().measure(preset, batch(), SEEDS))


def test_right_rules_pass_on_more_tokens_and_outputs_than_the_width() -> None:
    findings = trained(RIGHT)
    # Updates of hidden activations need tokens by Zipf's law (`check.tokens`), or fewer of them
    # than the width.
    failed = []
    for name, finding in findings.items():
        if not finding.ok and ("/" in name or "logits" in name):
            failed.append(name)
    assert failed == []
    # Every row that was read moves by the learning rate; a tenth of the table is not.
    assert findings["movement/token_embedding @1"].base == pytest.approx(1.0, abs=0.02)
    assert findings["gradient/norm_gain @0"].slope == pytest.approx(0.0, abs=0.15)
    assert findings["change logits @1"].slope == pytest.approx(0.0, abs=0.15)


def test_control_gradients_of_the_whole_output_measure_a_finite_width() -> None:
    """The term through the logits at the start is W^2 beside W M^-1/2 of M random targets."""
    values = []
    for model in series().definitions:
        inputs = step.StepInputs(
            factors.resolve(RIGHT, model), factors.hyperparams(series().config, 1)
        )

        @jax.jit
        def gradient(seed, stds, inputs=inputs, model=model):
            params = model.initialize(seed, stds, normals)
            grads, _ = step.gradients(model, params, inputs, batch(), 1)
            return grads[GAIN]

        stds = factors.init_stds(RIGHT, model)
        eps = inputs.factors.eps[GAIN]
        gains = [np.asarray(gradient(np.uint32(seed), stds)) / eps for seed in range(SEEDS)]
        values.append([[np.sqrt(np.mean(gain**2))] for gain in gains])

    finding = judged({"gradient/norm_gain": np.array(values)})["gradient/norm_gain @0"]
    assert finding.slope < -0.5
    assert not finding.ok


# Adam's first step moves a parameter by its rate, and eps is far below every gradient, so none of
# these mistakes changes the observable of another.
RATES_AND_EPS = {
    Mutant("norm_gain", "eps", 0.5): "gradient/norm_gain @0",
    Mutant("readout", "eps", 0.25): "gradient/readout @0",
    Mutant("readout", "lr", 0.25): "movement/readout @1",
    Mutant("token_embedding", "eps", 0.25): "gradient/token_embedding @0",
    Mutant("token_embedding", "lr", -0.25): "movement/token_embedding @1",
}
INITIALIZATION = {Mutant("token_embedding", "init_std", 0.25): "weight/token_embedding @0"}


@pytest.mark.parametrize("mistakes", [RATES_AND_EPS, INITIALIZATION], ids=["rates", "stds"])
def test_control_wrong_rules_are_seen_there(mistakes: dict[Mutant, str]) -> None:
    preset = RIGHT
    for mutant in mistakes:
        preset = mutant.of(preset)
    findings = trained(preset)
    assert [name for name in mistakes.values() if findings[name].ok] == []


def test_a_row_that_no_batch_reads_does_not_hide_a_frozen_table() -> None:
    frozen = trained(Mutant("token_embedding", "lr", -20.0).of(RIGHT))
    assert not frozen["movement/token_embedding @1"].ok
