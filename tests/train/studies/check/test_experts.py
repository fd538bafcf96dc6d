"""The coordinate check of layers of experts: the right rules pass, and a wrong one of router, experts, their mean or those that all
tokens go to does not. Without these, rules are held against theory in docs/evidence/checks.md."""

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
from mupax.zoo.configs import ComputeConfig, DecoderConfig
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
GROWN, SEEDS = 4, 4


@functools.cache
def _series() -> check.Series:
    """Width, experts' hidden size with it, and their number at a fixed share of active ones, four times as large all at once."""
    wide = sizes.grown(MODEL, "head_dim", GROWN * MODEL.heads_dim)
    models = [dataclasses.replace(one, compute=ComputeConfig(layers="scan")) for one in (
        MODEL, sizes.grown(wide, "experts", GROWN * 4)
    )]  # fmt: skip
    config = OptimizerConfig(
        name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
    )
    return check.Series([definition(model) for model in models], config, 1)


RIGHT = presets.get("mup", base=MODEL.base_sizes())


def _wrong(preset: Preset) -> dict[str, str]:
    """Observable to its slope beside theory's, where the trained preset's is not what theory says of the right one's."""
    first, last = _series().definitions
    expected = theory.of(RIGHT, first, last, "adam")
    findings = check.judge(
        _series().measure(preset, check.batch(MODEL), SEEDS), [1.0, GROWN], expected
    )
    return {
        f"{f.observable} @{f.step}": f"{f.slope:+.2f} for {f.expected.slope:+.2f}"
        for f in findings
        if not f.ok
    }


def test_the_right_rules_pass() -> None:
    assert _wrong(RIGHT) == {}


@pytest.mark.parametrize(
    ("mutant", "observable"),
    [
        (Mutant("block.router", "init_std", 0.5), "weight/block.router @0"),
        (Mutant("block.router", "lr", 0.5), "movement/block.router @1"),
        (Mutant("block.expert_in", "lr", 0.5), "movement/block.expert_in @1"),
        (Mutant("block.expert_out", "init_std", 0.5), "weight/block.expert_out @0"),
        (Mutant("block.mlp_in", "lr", 0.5), "movement/block.mlp_in @1"),
        (Mutant("block.mlp_out", "init_std", 0.5), "weight/block.mlp_out @0"),
        # As if experts were added up, and their gradients did not fall with a.
        (Mutant("block.expert_out", "eps", 1.0, "experts"), "gradient/block.expert_out @0"),
        (Mutant("block.expert_in", "eps", 1.0, "experts"), "gradient/block.expert_in @0"),
        (Mutant("block.router", "eps", 1.0, "experts"), "gradient/block.router @0"),
    ],
    ids=str,
)
def test_control_a_wrong_rule_of_each_role_is_seen(mutant: Mutant, observable: str) -> None:
    assert observable in _wrong(mutant.of(RIGHT))
