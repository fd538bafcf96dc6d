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
from mupax.__main__ import main
from mupax.presets import PresetError
from mupax.presets.analysis import verdicts
from mupax.presets.constants import GROUPS
from mupax.zoo.configs import CONFIGS, DecoderConfig

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
    return presets.get(
        name, base=None if presets.get(name).baseless else BASE.base_sizes(), **changes
    )


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_constant_is_a_factor_at_every_size_and_nothing_else_changes(name: str):
    plain = relative(name)
    tuned = relative(name, **CONSTANTS)
    for optimizer in plain.optimizers:
        for sizes in SIZES:
            for spec in BASE.parameters().values():
                plain_scales, tuned_scales = (
                    dataclasses.asdict(p.scales(spec, sizes, optimizer)) for p in (plain, tuned)
                )
                expected = EXPECTED.get(spec.group, {})
                assert tuned_scales == {
                    c: x if c not in expected else pytest.approx(x * expected[c])
                    for c, x in plain_scales.items()
                }
        assert verdicts.verdicts(tuned, optimizer) == verdicts.verdicts(plain, optimizer)
    assert tuned.logit_scale(SIZES[1]) == plain.logit_scale(SIZES[1])


def test_unused_and_1_are_bitwise_nothing():
    plain = relative("mup")
    ones = relative("mup", rates={"readout": 1}, stds={"query": 1.0})
    for spec in BASE.parameters().values():
        assert plain.row(spec) == plain.rule(spec)
        assert ones.scales(spec, SIZES[1]) == plain.scales(spec, SIZES[1])


def test_independent_decay_is_scaled_by_its_constant_alone():
    readout = BASE.parameters()["readout"]
    for constants, expected in (
        ({"rates": {"readout": 4}}, 1.0),
        ({"decays": {"readout": 4}}, 4.0),
    ):
        assert (
            relative("mup", **constants)
            .scales(readout, SIZES[1], "adamw", "independent")
            .weight_decay
            == expected
        )


@pytest.mark.parametrize("form", ["plain", "mean-field", "table-9"])
def test_constants_are_the_same_factors_in_every_form(form: Any):
    plain = relative("mup", form=form)
    tuned = relative("mup", form=form, **CONSTANTS)
    for spec in BASE.parameters().values():
        plain_scales, tuned_scales = (
            dataclasses.asdict(p.scales(spec, SIZES[1], "sgd")) for p in (plain, tuned)
        )
        for column, value in plain_scales.items():
            assert tuned_scales[column] == pytest.approx(
                value * EXPECTED.get(spec.group, {}).get(column, 1.0)
            ), spec.group


def test_an_exponent_is_1_at_the_base_and_a_power_of_the_axis_elsewhere():
    constants = {
        "rates.readout^embed": -0.5,
        "stds.mlp_out^layers": -0.5,
        "eps.all^embed": 1.0,
        "eps.key": 3.0,
    }
    plain = relative("sp")
    tuned = relative("sp", **constants)
    for spec in BASE.parameters().values():
        for sizes, wide, deep in ((SIZES[0], 1.0, 1.0), (SIZES[1], 4.0, 3.0)):
            plain_scales, tuned_scales = (
                dataclasses.asdict(p.scales(spec, sizes)) for p in (plain, tuned)
            )
            factors = {"eps": wide * (3.0 if spec.group == "block.key" else 1.0)}
            if spec.group == "readout":
                factors |= {"lr": wide**-0.5, "weight_decay": wide**0.5}
            if spec.group == "block.mlp_out":
                factors |= {"init_std": deep**-0.5}
            assert tuned_scales == pytest.approx(
                {c: x * factors.get(c, 1.0) for c, x in plain_scales.items()}
            ), spec.group


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
    ("words", "message"),
    [
        (
            "rates.patch_embedding 2",
            "rates.patch_embedding: the model has no parameters 'patch_embedding'; did you mean",
        ),
        ("stds.block.query.bias 2", "stds.block.query.bias: the model has no parameters"),
        ("stds.block.mlp_in.bias 2", "stds.block.mlp_in.bias changes nothing: biases start at 0"),
        (
            "decays.norm_gain 2",
            "decays.norm_gain changes nothing: mup does not decay gains and biases",
        ),
        (
            "rates.query 2 --preset.rates.block.query 2",
            "rates.query and rates.block.query name one group; write one",
        ),
        (
            "rates.readout 2",
            "a tied readout has only a multiplier of its own; write rates.token_embedding",
        ),
        ("rates.readout", "--preset.rates.readout needs a value after it"),
        (
            "rates.readout 2 --preset.constants rates.readout=3",
            "rates.readout is given twice, as 3 and 2",
        ),
    ],
)
def test_a_group_that_the_model_does_not_have_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
):
    biased = (
        "stds.block.query.bias" not in words
    )  # gpt2 has biases and ties its readout, lm-tiny neither
    argv = f"table mup --model {'gpt2' if biased else 'lm-tiny'} --preset.{words}"
    assert main(["presets", *argv.split()]) == 2
    assert message in capsys.readouterr().err


def test_control_what_the_same_models_do_have(capsys: pytest.CaptureFixture[str]):
    for model, words in (
        ("gpt2", "multipliers.readout 2"),
        ("gpt2", "rates.block.query.bias 2"),
        ("lm-tiny", "rates.readout 2"),
    ):
        assert main(f"presets table mup --model {model} --preset.{words}".split()) == 0
    capsys.readouterr()


def test_the_table_shows_them_by_group(capsys: pytest.CaptureFixture[str]):
    table = "table mup --model lm-tiny --base lm-proxy --preset.rates.readout 4 --preset.stds.token-embedding=0.5 --json"
    for extra in ("", " --constant c_a=0.5"):
        assert main(["presets", *(table + extra).split()]) == 0
        rows = {row["group"]: row for row in json.loads(capsys.readouterr().out)}
        assert (rows["readout"]["lr"], rows["token_embedding"]["init_std"]) == (4.0, 0.5)
    assert (
        main(
            [
                "presets",
                "table",
                "mup",
                "--model",
                "lm-tiny",
                "--preset.rates.readout",
                "4",
                "--preset.decays.query",
                "0",
                "--rules",
            ]
        )
        == 0
    )
    rules = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
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
        command = [sys.executable, "-c", TIED]
        products.add(subprocess.check_output(command, env=environment, text=True))
    assert len(products) == 1
    assert len({(0.1 * 0.7 * 0.3).hex(), (0.1 * 0.3 * 0.7).hex(), (0.3 * 0.7 * 0.1).hex()}) > 1


def test_a_missing_number_of_experts_counts_as_one():
    mup = presets.get("mup", base={"embed": 64, "experts": 4})
    (caution,) = mup.cautions({"embed": 64, "experts": 8})
    assert caution.startswith("active/experts is 0.5 times the base's")
