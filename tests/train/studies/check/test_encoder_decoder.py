"""Depth of an encoder-decoder in the coordinate check: each stack alone, theory's word on the encoder, and wrong rules by name.

One compiled pair of narrow models, whose decoder alone gets deeper.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import ParamSpec, Preset, Rule
from mupax.presets.rule import ONE, axis
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors
from mupax.train.studies.check import check, groups, report, theory
from mupax.train.studies.check.check import Finding
from mupax.zoo import configs
from mupax.zoo.definition import Definition, definition

ED: Any = dataclasses.replace(configs.get("ed-tiny"), tied=False)  # pyright: ignore[reportCallIssue]
GROWTHS = ("depth", "decoder", "encoder_depth")
SEEDS = 3
one = functools.cache(definition)


@functools.cache
def ends(growth: str, model: configs.ModelConfig = ED) -> tuple[Definition, Definition]:
    """The smallest model, and one eight times as deep: both stacks, the decoder's or the encoder's alone. Nothing is built of it."""
    written = {"encoder_depth"} if growth == "decoder" else ()
    start = dataclasses.replace(model, encoder_depth=2) if written else model  # pyright: ignore[reportCallIssue]
    grown = check.grow(start, "depth" if written else growth, 4, written)
    return one(grown[0]), dataclasses.replace(one(grown[0]), sizes=grown[-1].sizes())


def preset(name: str = "depth-mup", **constants: float) -> Preset:
    return presets.get(name, base=check.smallest(ED).base_sizes(), **constants)  # pyright: ignore[reportArgumentType]


def slopes(growth: str, of: Preset, optimizer: str = "adam") -> dict[str, float]:
    expected = theory.of(of, *ends(growth), optimizer, strict=True)
    return {f"{name} @{step}": round(each.slope, 6) for (name, step), each in expected.items()}


def troubles(
    growth: str, of: Preset, optimizer: str = "adam", model: configs.ModelConfig = ED
) -> dict[str, str]:
    expected = theory.of(of, *ends(growth, model), optimizer)
    return {
        f"{name} @{step}": each.trouble for (name, step), each in expected.items() if each.trouble
    }


@pytest.mark.core
def test_each_stack_grows_alone_or_both_together():
    sizes = {
        growth: tuple(ends(growth)[1].sizes[axis] for axis in ("layers", "encoder_layers"))
        for growth in GROWTHS
    }
    assert sizes == {"depth": (16, 16), "decoder": (16, 2), "encoder_depth": (2, 16)}
    with pytest.raises(
        configs.ConfigError, match="a decoder has no encoder, so no encoder_depth; write depth"
    ):
        check.grow(configs.get("lm-proxy"), "encoder_depth", 2)


@pytest.mark.core
@pytest.mark.parametrize("alpha_l", [0.5, 1.0])
def test_the_encoders_first_gradients_are_expected_to_fall_with_the_decoders_depth(alpha_l: float):
    """As L_d^(1/2 - alpha_l), in the expectation itself and not as room around it; the encoder's own depth changes nothing of it."""
    rule = preset(alpha_l=alpha_l)
    for growth, first in (("decoder", 0.5 - alpha_l), ("encoder_depth", 0.0)):
        adam, sgd = slopes(growth, rule), slopes(growth, rule, "sgd")
        of_encoder = {name for name in adam if name.startswith("gradient/encoder")}
        assert {adam[name] for name in of_encoder} == {first}, growth
        assert {
            adam[name] for name in adam if name.startswith("gradient/") and name not in of_encoder
        } == {0.0}
        # SGD's step is the gradient: rates are for what it is later, when branches add up in concert.
        own = -0.5 if alpha_l == 0.5 and growth != "decoder" else 0.0
        assert sgd["movement/encoder.block.mlp_out @1"] == own + first
    assert slopes("decoder", rule)["movement/encoder.block.mlp_out @1"] == 0


@pytest.mark.core
@pytest.mark.parametrize("growth", GROWTHS)
def test_right_tables_are_good_whichever_stack_grows(growth: str):
    tied = dataclasses.replace(ED, tied=True)
    assert not troubles(growth, preset("completep"), model=tied)
    for optimizer in ("adam", "sgd"):
        assert not troubles(growth, preset(alpha_l=0.75), optimizer)


@pytest.mark.core
def test_a_table_without_a_rule_for_depth_is_named_by_the_stack_that_grows():
    verdicts = troubles("encoder_depth", preset("mup"))
    assert (
        verdicts["movement/encoder.block.value @1"] == verdicts["change residual @1"] == "explodes"
    )
    assert not {name for name in verdicts if name.startswith("movement/block.")}
    verdicts = troubles("decoder", preset("mup"))
    assert verdicts["movement/block.cross.attention_out @1"] == "explodes"
    assert not {name for name in verdicts if name.startswith("movement/encoder")}


def mistaken(right: Preset, group: str, mistake: Callable[[Rule], Rule]) -> Preset:
    def rule(spec: ParamSpec) -> Rule:
        row = right.rule(spec)
        return mistake(row) if spec.group == group else row

    return dataclasses.replace(right, rule=rule)


@pytest.mark.core
def test_wrong_depth_rules_in_a_table_are_named():
    right, layers = preset(alpha_l=0.5), axis("layers")
    cross = mistaken(right, "block.cross.attention_out", lambda row: row.times(adam=layers**0.5))
    verdicts = troubles("decoder", cross)
    assert verdicts["movement/block.cross.attention_out @1"] == "explodes"
    assert {name for name in verdicts if "/" in name} == {"movement/block.cross.attention_out @1"}
    encoder = mistaken(right, "encoder.block.mlp_out", lambda row: row.times(adam=layers**0.5))
    assert troubles("encoder_depth", encoder)["movement/encoder.block.mlp_out @1"] == "explodes"
    assert not troubles("decoder", encoder)
    eps = mistaken(preset(alpha_l=1.0), "encoder.block.value", lambda row: row.times(eps=layers))
    assert troubles("encoder_depth", eps) == {"gradient/encoder.block.value @0": "eps dominates"}
    unscaled = dataclasses.replace(right, branch=ONE)
    assert troubles("depth", unscaled)["change residual @1"] == "explodes"


@functools.cache
def series() -> check.Series:
    fields: dict[str, Any] = {
        "width": 32,
        "num_heads": 4,
        "vocab_size": 32,
        "seq_len": 8,
        "encoder_depth": 2,
    }
    grown = check.grow(dataclasses.replace(ED, **fields), "depth", 3, fields)
    adam = OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    return check.Series([definition(each) for each in (grown[0], grown[-1])], adam, steps=1)


def judged(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[factors.Factors, float], None]
) -> list[Finding]:
    """What the right table's theory says of a program with other numbers: `change` has them, and the depth over the base's."""
    resolve, (first, last) = factors.resolve, series().definitions
    right = presets.get("depth-mup", base=first.sizes, alpha_l=0.5)

    def changed(preset: Preset, model: Definition, *args: Any) -> factors.Factors:
        numbers = resolve(preset, model, *args)
        numbers.forward["block.branch"] = np.array(numbers.forward["block.branch"])
        change(numbers, model.sizes["layers"] / first.sizes["layers"])
        return numbers

    monkeypatch.setattr(factors, "resolve", changed)
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(0, 32, (8, 8)).astype(np.int32)
        for name in ("inputs", "decoder_inputs", "targets")
    }
    batch |= {"input_mask": np.ones((8, 8), np.int32), "weights": np.ones((8, 8), np.float32)}
    expected = theory.of(right, first, last, "adam")
    assert not groups.not_judged(first.specs, expected)
    return check.judge(series().measure(right, batch, SEEDS), [1, 4], expected)


def branches(which: slice) -> Callable[[factors.Factors, float], None]:
    """Without their factor of depth."""

    def change(numbers: factors.Factors, m: float) -> None:
        numbers.forward["block.branch"][:, which] *= m**0.5

    return change


def rates(prefix: str, power: float) -> Callable[[factors.Factors, float], None]:
    def change(numbers: factors.Factors, m: float) -> None:
        for name in numbers.lr:
            numbers.lr[name] = numbers.lr[name] * (m**power if name.startswith(prefix) else 1)

    return change


def test_the_right_program_passes(monkeypatch: pytest.MonkeyPatch):
    findings = judged(monkeypatch, lambda numbers, m: None)
    assert check.passes(findings), {
        f"{f.observable} @{f.step}": f.slope for f in findings if not f.ok
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (branches(slice(None)), ["contribution contradicts theory", "block.cross.attention_out (contribution"]),
        (branches(slice(1, 2)), ["contribution contradicts theory", "block.cross.attention_out (contribution"]),
        (rates("encoder.block", -0.5), ["encoder.block.query (movement)", "encoder.block.mlp_out (movement)"]),
        (rates("block.cross.out", 0.5), ["block.cross.attention_out (movement)"]),
        (rates("embedding_norm", -0.5), ["by role: norm_gain (movement of embedding_norm)"]),
        (rates("encoder.embedding_norm", -0.5), ["by role: encoder.norm_gain (movement of embedding_norm)"]),
    ],
    ids=[
        "branches without depth", "cross-attention without depth", "encoder by the decoder's depth", "rate of cross out",
        "embedding norm as one of a block", "encoder's embedding norm as one of a block",
    ],
)  # fmt: skip
def test_a_wrong_depth_rule_fails_by_the_name_of_its_role(
    monkeypatch: pytest.MonkeyPatch, change: Any, named: list[str]
):
    findings = judged(monkeypatch, change)
    line = report.verdict_line(findings)
    assert "the program does not do what its table says" in line
    assert all(name in line for name in named), line


@pytest.mark.core
def test_the_command_grows_either_stack(capsys: pytest.CaptureFixture[str]):
    words = [
        "check",
        "ed-tiny",
        "--preset",
        "depth-mup",
        "--preset.alpha-l",
        "1.0",
        "--sizes",
        "3",
        "--dry-run",
    ]
    assert main([*words, "--grow", "depth"]) == 0
    shown = capsys.readouterr().out
    assert "width 64, 4 heads of 16, depth 8, encoder 8" in shown
    assert "gradient/encoder.block.value after 0: theory says -0.50" in shown
    assert main([*words, "--grow", "depth", "--model.encoder-depth", "3"]) == 0
    assert "depth 8, encoder 3" in capsys.readouterr().out
    assert main([*words, "--grow", "encoder_depth"]) == 0
    assert "depth 2, encoder 8" in capsys.readouterr().out
