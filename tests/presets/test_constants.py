"""Constants of parameter groups change base values and nothing about how anything scales."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mupax import presets
from mupax.presets import PresetError
from mupax.presets.analysis import verdicts
from mupax.presets.constants import GROUPS
from mupax.zoo.configs import CONFIGS, DecoderConfig
from tests.fixtures.commands import command, output

pytestmark = pytest.mark.core

BASE = DecoderConfig(width=8, num_heads=4, depth=2, vocab_size=11, seq_len=5, qk_norm=True)
SIZES = [BASE.sizes(), dataclasses.replace(BASE, width=32, depth=6).sizes()]
CONSTANTS: dict[str, Any] = {
    "rates": {"readout": 4.0, "block.query.norm_gain": 0.5},
    "stds": {"block.mlp_in": 3.0},
    "multipliers": {"attention_out": 0.25},
    "decays": {"token_embedding": 0.0, "key": 2.0},
}
EXPECTED = {
    "readout": {"lr": 4.0, "weight_decay": 0.25},
    "block.query.norm_gain": {"lr": 0.5},
    "block.mlp_in": {"init_std": 3.0},
    "block.attention_out": {"multiplier": 0.25},
    "token_embedding": {"weight_decay": 0.0},
    "block.key": {"weight_decay": 2.0},
}
"""By group; the coupled decay of a faster group is slower, so that lr*wd stays."""


def relative(name: str, **changes: Any) -> presets.Preset:
    base = None if presets.get(name).baseless else BASE.base_sizes()
    return presets.get(name, base=base, **changes)


def assert_factors(
    plain: presets.Preset,
    tuned: presets.Preset,
    expected: dict[str, dict[str, float]],
    sizes: dict[str, int],
    optimizer: str = "adam",
) -> None:
    """Assert that a preset differs from another by factors of some groups' columns alone.

    Args:
        expected: Factors by group and column.
    """
    for spec in BASE.parameters().values():
        factors = expected.get(spec.group, {})
        values = dataclasses.asdict(plain.scales(spec, sizes, optimizer))
        for column, value in dataclasses.asdict(tuned.scales(spec, sizes, optimizer)).items():
            if column in factors:
                assert value == pytest.approx(values[column] * factors[column]), spec.group
            else:
                assert value == values[column], (spec.group, column)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_constant_is_a_factor_at_every_size_and_nothing_else_changes(name: str):
    plain = relative(name)
    tuned = relative(name, **CONSTANTS)
    for optimizer in plain.optimizers:
        for sizes in SIZES:
            assert_factors(plain, tuned, EXPECTED, sizes, optimizer)
        assert verdicts.verdicts(tuned, optimizer) == verdicts.verdicts(plain, optimizer)
    assert tuned.logit_scale(SIZES[1]) == plain.logit_scale(SIZES[1])


def test_unused_and_1_are_bitwise_nothing():
    plain = relative("mup")
    ones = relative("mup", rates={"readout": 1}, stds={"query": 1.0})
    for spec in BASE.parameters().values():
        assert plain.row(spec) == plain.rule(spec)
        assert ones.scales(spec, SIZES[1]) == plain.scales(spec, SIZES[1])


@pytest.mark.parametrize(("constant", "expected"), [("rates.readout", 1), ("decays.readout", 4)])
def test_independent_decay_is_scaled_by_its_constant_alone(constant: str, expected: float):
    preset = relative("mup", **{constant: 4})
    scales = preset.scales(BASE.parameters()["readout"], SIZES[1], "adamw", "independent")
    assert scales.weight_decay == expected


@pytest.mark.parametrize("form", ["plain", "mean-field", "table-9"])
def test_constants_are_the_same_factors_in_every_form(form: Any):
    tuned = relative("mup", form=form, **CONSTANTS)
    assert_factors(relative("mup", form=form), tuned, EXPECTED, SIZES[1], "sgd")


def test_an_exponent_is_1_at_the_base_and_a_power_of_the_axis_elsewhere():
    constants = {
        "rates.readout^embed": -0.5, "stds.mlp_out^layers": -0.5, "eps.all^embed": 1.0, "eps.key": 3.0
    }  # fmt: skip
    for sizes, wide, deep in ((SIZES[0], 1.0, 1.0), (SIZES[1], 4.0, 3.0)):
        expected: dict[str, dict[str, float]] = {
            spec.group: {"eps": wide} for spec in BASE.parameters().values()
        }
        expected["block.key"]["eps"] *= 3
        expected["readout"] |= {"lr": wide**-0.5, "weight_decay": wide**0.5}
        expected["block.mlp_out"]["init_std"] = deep**-0.5
        assert_factors(relative("sp"), relative("sp", **constants), expected, sizes)


def test_a_deviation_may_be_0():
    mlp_out = BASE.parameters()["block.mlp.down"]
    assert relative("mup", **{"stds.mlp_out": 0}).scales(mlp_out, SIZES[1]).init_std == 0


def test_every_group_of_every_model_is_a_name():
    for model in (*CONFIGS.values(), BASE):
        assert {spec.group for spec in model.parameters().values()} <= set(GROUPS)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (
            {"rates.reedout": 4},
            r"rates\.reedout: no parameter group is named 'reedout'; did you mean 'readout'\?",
        ),
        (
            {"rate.readout": 4},
            r"no constant is named 'rate\.readout'; did you mean 'rates\.readout'\?",
        ),
        (
            {"readout.rates": 4},
            r"no constant is named 'readout\.rates'; did you mean 'rates\.readout'\?",
        ),
        ({"rates.readout": 0}, r"rates\.readout=0: write a number from 1e-30 to 1e30, such as"),
        ({"rates.readout^width": 1}, r"rates\.readout\^width: no logical axis is named 'width'"),
        ({"rates.readout^embed": "wide"}, r"rates\.readout\^embed=wide: write an exponent"),
        ({"decays.readout": -1}, r"decays\.readout=-1: write 0, or a number from 1e-30 to 1e30"),
        ({"rates.readout": 1e300}, r"rates\.readout=1e\+300: write a number from 1e-30 to 1e30"),
        ({"rates.readout": "nan"}, r"rates\.readout=nan: write a number"),
        ({"stds.readout": "big"}, r"stds\.readout=big: write 0, or a number"),
        ({"rates": 4}, r"mup takes alpha_a, .*, not rates"),
        (
            {"zero_readout": True, "stds": {"readout": 2}},
            r"stds\.readout changes nothing: the readout starts at zero",
        ),
    ],
)
def test_a_name_or_number_that_is_none_is_refused(constants: dict[str, Any], message: str):
    with pytest.raises(PresetError, match=message):
        presets.get("mup", **constants)


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("gpt2", "rates.patch_embedding 2", "rates.patch_embedding: the model has no parameters 'patch_embedding'; did you mean"),
        # lm-tiny has no biases.
        ("lm-tiny", "stds.block.query.bias 2", "stds.block.query.bias: the model has no parameters"),
        ("gpt2", "stds.block.mlp_in.bias 2", "stds.block.mlp_in.bias changes nothing: biases start at 0"),
        ("gpt2", "decays.norm_gain 2", "decays.norm_gain changes nothing: mup does not decay gains and biases"),
        (
            "gpt2", "rates.query 2 --preset.rates.block.query 2",
            "rates.query and rates.block.query name one group; write one",
        ),
        ("gpt2", "rates.readout 2", "a tied readout has only a multiplier of its own; write rates.token_embedding"),
        ("gpt2", "rates.readout", "--preset.rates.readout needs a value after it"),
        (
            "gpt2", "rates.readout 2 --preset.constants rates.readout=3",
            "rates.readout is given twice, as 3 and 2",
        ),
    ],
)  # fmt: skip
def test_a_group_that_the_model_does_not_have_is_refused(model: str, words: str, message: str):
    done = command("presets table mup --model", model, f"--preset.{words}")
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2", "multipliers.readout 2"),
        ("gpt2", "rates.block.query.bias 2"),
        ("lm-tiny", "rates.readout 2"),
    ],
)
def test_control_what_the_same_models_do_have(model: str, words: str):
    assert output("presets table mup --model", model, f"--preset.{words}")


def test_the_table_shows_them_by_group():
    table = "presets table mup --model lm-tiny --preset.rates.readout 4"
    relative = f"{table} --base lm-proxy --preset.stds.token-embedding=0.5 --json"
    for extra in ("", "--constant c_a=0.5"):
        rows = {row["group"]: row for row in json.loads(output(relative, extra))}
        assert (rows["readout"]["lr"], rows["token_embedding"]["init_std"]) == (4.0, 0.5)
    lines = output(table, "--preset.decays.query 0 --rules").splitlines()
    rules = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rules["readout"][-3:] == ["4", "D^-1", "yes"]
    assert rules["block.query"][-1] == "no"


TIED = """
from mupax.presets.roles import ParamSpec, Role
from mupax.presets.rule import constant

axes = ("embed", "vocab")
spec = ParamSpec(role=Role.READOUT, axes=axes, fan_in=("embed",), tied=True)
factors = {"rates.readout": 0.1, "rates.tied_readout": 0.7, "rates.all": 0.3}
print(constant("rates", spec, factors).hex())
"""
"""Prints a product of three factors that depends on their order in the last bit."""


def test_a_product_of_constants_has_the_same_bits_in_every_process():
    products = set()
    for seed in range(6):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        program = [sys.executable, "-c", TIED]
        products.add(subprocess.check_output(program, env=environment, text=True))
    assert len(products) == 1
    assert len({(0.1 * 0.7 * 0.3).hex(), (0.1 * 0.3 * 0.7).hex(), (0.3 * 0.7 * 0.1).hex()}) > 1


def test_a_missing_number_of_experts_counts_as_one():
    mup = presets.get("mup", base={"embed": 64, "experts": 4})
    (caution,) = mup.cautions({"embed": 64, "experts": 8})
    assert caution.startswith("active/experts is 0.5 times the base's")
