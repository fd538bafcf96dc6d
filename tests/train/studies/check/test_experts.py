"""Coordinate check of layers of experts: right rules pass, and a wrong one of each role does not.

Without a router, experts and shared experts, rules are held against theory in
docs/evidence/checks.md.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from mupax import presets
from mupax.presets import Preset
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import sizes
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check, theory
from mupax.zoo.configs import ComputeConfig, ConfigError, DecoderConfig
from mupax.zoo.definition import definition
from scripts.check.mutants import Mutant

MODEL = DecoderConfig(
    width=32,
    depth=1,
    num_heads=2,
    vocab_size=16,
    seq_len=8,
    mlp_ratio=2,
    experts=4,
    shared_experts=1,
)
GROWN = 4
SEEDS = 4


@pytest.mark.parametrize("shared", [None, 1])
def test_experts_do_not_grow_as_an_mlp(shared: int | None) -> None:
    """Shared experts have a dense size, but `mlp_ratio` would not have moved it."""
    model = dataclasses.replace(MODEL, shared_experts=shared)
    for grow in (lambda: sizes.grown(model, "mlp", 128), lambda: sizes.of(model, "mlp")):
        with pytest.raises(ConfigError, match="write expert_dim"):
            grow()
    grown = sizes.grown(model, "expert_dim", 4 * model.expert_size)
    assert sizes.of(grown, "expert_dim") == 4 * sizes.of(model, "expert_dim")


@functools.cache
def _series() -> check.Series:
    """Return a model and one whose width, hidden size and number of experts are 4 times as large.

    The share of active experts stays.
    """
    wide = sizes.grown(MODEL, "head_dim", GROWN * MODEL.heads_dim)
    models = []
    for model in (MODEL, sizes.grown(wide, "experts", GROWN * 4)):
        models.append(dataclasses.replace(model, compute=ComputeConfig(layers="scan")))
    config = OptimizerConfig(
        name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
    )
    return check.Series([definition(model) for model in models], config, 1)


RIGHT = presets.get("mup", base=MODEL.base_sizes())


def _wrong(preset: Preset) -> dict[str, str]:
    """Return the slopes that are not what theory says of the right rules, by observable."""
    first, last = _series().definitions
    expected = theory.of(RIGHT, first, last, "adam")
    measured = _series().measure(preset, check.batch(MODEL), SEEDS)
    failed = {}
    for finding in check.judge(measured, [1.0, GROWN], expected):
        if not finding.ok:
            slopes = f"{finding.slope:+.2f} for {finding.expected.slope:+.2f}"
            failed[f"{finding.observable} @{finding.step}"] = slopes
    return failed


def test_the_right_rules_pass() -> None:
    assert _wrong(RIGHT) == {}


# Initial weights, Adam's first movements and gradients over eps do not depend on another group's
# mistake in the same column, so that one training shows them all.
MISTAKES = {
    "init_std": {
        Mutant("block.router", "init_std", 0.5): "weight/block.router @0",
        Mutant("block.expert_out", "init_std", 0.5): "weight/block.expert_out @0",
        Mutant("block.mlp_out", "init_std", 0.5): "weight/block.mlp_out @0",
    },
    "lr": {
        Mutant("block.router", "lr", 0.5): "movement/block.router @1",
        Mutant("block.expert_in", "lr", 0.5): "movement/block.expert_in @1",
        Mutant("block.mlp_in", "lr", 0.5): "movement/block.mlp_in @1",
    },
    # As if experts were added up, and their gradients did not fall with a.
    "eps": {
        Mutant("block.expert_out", "eps", 1.0, "experts"): "gradient/block.expert_out @0",
        Mutant("block.expert_in", "eps", 1.0, "experts"): "gradient/block.expert_in @0",
        Mutant("block.router", "eps", 1.0, "experts"): "gradient/block.router @0",
    },
}


@pytest.mark.parametrize("column", MISTAKES)
def test_control_a_wrong_rule_of_each_role_is_seen(column: str) -> None:
    preset = RIGHT
    for mutant in MISTAKES[column]:
        preset = mutant.of(preset)
    assert set(MISTAKES[column].values()) <= _wrong(preset).keys()
