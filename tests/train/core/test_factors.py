"""Constants of parameter groups in a run: the numbers of their groups, and no other, in a program of the same shape."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mupax.presets import PresetError, get
from mupax.train.config.cli import parse
from mupax.train.config.recipes import RECIPES
from mupax.train.core.factors import resolve
from mupax.train.core.program import Program, assemble
from mupax.train.studies.sweep.sweep import grouped
from mupax.zoo.definition import definition

pytestmark = pytest.mark.core


def program_of(*words: str) -> Program:
    return assemble(parse("lm-tiny", RECIPES["lm-tiny"], [*words]).config)


def test_a_constant_reaches_its_own_numbers_alone():
    words = "--preset.rates.readout 4 --preset.stds.query 2 --preset.multipliers.token-embedding 3 --preset.decays.mlp_in 0"
    plain, tuned = program_of(), program_of(*words.split())
    expected = {
        ("lr", "readout"): 4, ("multiplier", "token"): 3,
        ("weight_decay", "block.mlp.up"): 0, ("weight_decay", "block.mlp.gate"): 0,
    }  # fmt: skip
    for column in ("multiplier", "lr", "eps", "weight_decay"):
        for name, number in getattr(plain.inputs.factors, column).items():
            factor = np.float32(expected.get((column, name), 1))
            np.testing.assert_array_equal(
                getattr(tuned.inputs.factors, column)[name], number * factor, f"{column} {name}"
            )
    assert {name for name in plain.stds if (plain.stds[name] != tuned.stds[name]).any()} == {
        "block.attention.query"
    }
    shapes = (jax.tree.map(jax.typeof, program.inputs) for program in (plain, tuned))
    assert next(shapes) == next(shapes)
    assert len(grouped([plain.config, tuned.config], {})) == 1


def test_a_group_that_a_model_of_ones_own_does_not_have_is_refused():
    model = definition(RECIPES["vit-digits"]().model)
    resolve(get("mup", rates={"patch_embedding": 2}), model)
    with pytest.raises(
        PresetError,
        match=r"rates\.token_embedding: the model has no parameters 'token_embedding'; did you mean",
    ):
        resolve(get("mup", rates={"token_embedding": 2}), model)
