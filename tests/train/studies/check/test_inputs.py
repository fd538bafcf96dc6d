"""The coordinate check of a vocabulary and a number of tokens that are large beside the width: right rules pass, wrong ones do not.

One compiled pair of narrow models on 2,048 evenly drawn tokens with random targets, as a user's first batch is.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mupax import presets
from mupax.presets import Preset
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check, observables, theory
from mupax.train.studies.check.judge import Finding
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import definition
from scripts.check.mutants import Mutant

VOCAB, CONTEXT, SEQUENCES, SEEDS = 160, 8, 256, 3
MODEL = DecoderConfig(
    width=32, depth=1, num_heads=2, vocab_size=VOCAB, seq_len=CONTEXT, positions="rotary", norm="rmsnorm", bias=False,
    mlp_ratio=2, compute=ComputeConfig(layers="scan"),
)  # fmt: skip
RIGHT = presets.get("mup", base=MODEL.base_sizes())


def batch() -> dict[str, np.ndarray]:
    """A tenth of the vocabulary is never read."""
    rng = np.random.default_rng(0)
    inputs, targets = (
        rng.integers(0, most, (SEQUENCES, CONTEXT)).astype(np.int32)
        for most in (VOCAB * 9 // 10, VOCAB)
    )
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def series() -> check.Series:
    keeps = {"width", "num_heads", "depth", "vocab_size", "seq_len", "mlp_ratio"}
    first, _, last = check.grow(MODEL, "heads", 3, keeps)
    adam = OptimizerConfig(
        name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
    )
    return check.Series([definition(first), definition(last)], adam, 1)


shared = functools.cache(series)


def judged(trained: Preset, measured_by: check.Series | None = None) -> dict[str, Finding]:
    """Train one preset, ask theory about the right one."""
    by = measured_by or shared()
    expected = theory.of(RIGHT, by.definitions[0], by.definitions[-1], "adam")
    findings = check.judge(by.measure(trained, batch(), SEEDS), [1.0, 4.0], expected)
    return {f"{finding.observable} @{finding.step}": finding for finding in findings}


def test_right_rules_pass_on_more_tokens_and_outputs_than_the_width() -> None:
    findings = judged(RIGHT)
    # Updates of hidden activations need tokens by Zipf's law (`check.tokens`), or fewer of them than the width.
    judged_here = {
        name: finding for name, finding in findings.items() if "/" in name or "logits" in name
    }
    assert [name for name, finding in judged_here.items() if not finding.ok] == []
    # Every row that was read moves by the learning rate; a tenth of the table is not.
    assert findings["movement/token_embedding @1"].base == pytest.approx(1.0, abs=0.02)
    assert findings["gradient/norm_gain @0"].slope == pytest.approx(0.0, abs=0.15)
    assert findings["change logits @1"].slope == pytest.approx(0.0, abs=0.15)


def test_control_gradients_of_the_whole_output_measure_a_finite_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The term through the logits at the start is W^2 beside W M^-1/2 of M random targets."""
    gradients = observables.gradients
    monkeypatch.setattr(
        observables,
        "gradients",
        lambda model, params, run, *rest: gradients(
            model, params, run._replace(reference=None), *rest
        ),
    )
    findings = judged(RIGHT, series())
    assert findings["gradient/norm_gain @0"].slope < -0.5
    assert not findings["gradient/norm_gain @0"].ok


@pytest.mark.parametrize(
    ("mutant", "observable"),
    [
        (Mutant("norm_gain", "eps", 0.5), "gradient/norm_gain @0"),
        (Mutant("readout", "eps", 0.25), "gradient/readout @0"),
        (Mutant("readout", "lr", 0.25), "movement/readout @1"),
        (Mutant("token_embedding", "eps", 0.25), "gradient/token_embedding @0"),
        (Mutant("token_embedding", "lr", -0.25), "movement/token_embedding @1"),
        (Mutant("token_embedding", "init_std", 0.25), "weight/token_embedding @0"),
    ],
    ids=str,
)
def test_control_wrong_rules_are_seen_there(mutant: Mutant, observable: str) -> None:
    assert not judged(mutant.of(RIGHT))[observable].ok


def test_a_row_that_no_batch_reads_does_not_hide_a_frozen_table() -> None:
    frozen = judged(Mutant("token_embedding", "lr", -20.0).of(RIGHT))["movement/token_embedding @1"]
    assert not frozen.ok
