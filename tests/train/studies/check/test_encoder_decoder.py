"""Coordinate check of an encoder-decoder's depth: each stack alone, and wrong rules by name."""

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
cached_definition = functools.cache(definition)


@functools.cache
def ends(growth: str, model: configs.ModelConfig = ED) -> tuple[Definition, Definition]:
    """Return the smallest model, and one whose decoder, encoder or both are 8 times as deep.

    The second is the first with other sizes, because theory asks no more of it.
    """
    first_model = model
    written = set()
    if growth == "decoder":
        first_model = dataclasses.replace(model, encoder_depth=2)  # pyright: ignore[reportCallIssue]
        written = {"encoder_depth"}
    axis_name = "depth" if growth == "decoder" else growth
    grown = check.grow(first_model, axis_name, 4, written)
    first = cached_definition(grown[0])
    return first, dataclasses.replace(first, sizes=grown[-1].sizes())


def preset(name: str = "depth-mup", **constants: Any) -> Preset:
    base: Any = check.smallest(ED).base_sizes()
    return presets.get(name, base=base, **constants)


def slopes(growth: str, table: Preset, optimizer: str = "adam") -> dict[str, float]:
    expected = theory.of(table, *ends(growth), optimizer, strict=True)
    return {f"{name} @{step}": round(e.slope, 6) for (name, step), e in expected.items()}


def troubles(
    growth: str, table: Preset, optimizer: str = "adam", model: configs.ModelConfig = ED
) -> dict[str, str]:
    expected = theory.of(table, *ends(growth, model), optimizer)
    return {f"{name} @{step}": e.trouble for (name, step), e in expected.items() if e.trouble}


@pytest.mark.core
def test_each_stack_grows_alone_or_both_together():
    depths = {}
    for growth in GROWTHS:
        _, last = ends(growth)
        depths[growth] = (last.sizes["layers"], last.sizes["encoder_layers"])
    assert depths == {"depth": (16, 16), "decoder": (16, 2), "encoder_depth": (2, 16)}
    message = "a decoder has no encoder, so no encoder_depth; write depth"
    with pytest.raises(configs.ConfigError, match=message):
        check.grow(configs.get("lm-proxy"), "encoder_depth", 2)


@pytest.mark.core
@pytest.mark.parametrize("alpha_l", [0.5, 1.0])
def test_the_encoders_first_gradients_are_expected_to_fall_with_the_decoders_depth(alpha_l: float):
    """As L_d^(1/2 - alpha_l), in the expectation itself and not as an allowance around it.

    The encoder's own depth does not change it.
    """
    rule = preset(alpha_l=alpha_l)
    for growth, first in (("decoder", 0.5 - alpha_l), ("encoder_depth", 0.0)):
        adam = slopes(growth, rule)
        sgd = slopes(growth, rule, "sgd")
        by_stack: dict[bool, set[float]] = {True: set(), False: set()}
        for name, slope in adam.items():
            if name.startswith("gradient/"):
                by_stack[name.startswith("gradient/encoder")].add(slope)
        assert by_stack == {True: {first}, False: {0.0}}, growth
        # SGD's step is the gradient. Its rates are for later gradients, when branches add up.
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
    assert verdicts["movement/encoder.block.value @1"] == "explodes"
    assert verdicts["change residual @1"] == "explodes"
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
    right = preset(alpha_l=0.5)
    layers = axis("layers")
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
    return check.Series([definition(grown[0]), definition(grown[-1])], adam, steps=1)


def judged(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[factors.Factors, float], None]
) -> list[Finding]:
    """Judge a program that gets other values than the right table has.

    Args:
        change: Function that changes the factors. It also gets the depth over the base's.
    """
    resolve = factors.resolve
    first, last = series().definitions
    right = presets.get("depth-mup", base=first.sizes, alpha_l=0.5)

    def changed(preset: Preset, model: Definition, *args: Any) -> factors.Factors:
        values = resolve(preset, model, *args)
        values.forward["block.branch"] = np.array(values.forward["block.branch"])
        change(values, model.sizes["layers"] / first.sizes["layers"])
        return values

    monkeypatch.setattr(factors, "resolve", changed)
    rng = np.random.default_rng(0)
    batch = {}
    for name in ("inputs", "decoder_inputs", "targets"):
        batch[name] = rng.integers(0, 32, (8, 8)).astype(np.int32)
    batch |= {"input_mask": np.ones((8, 8), np.int32), "weights": np.ones((8, 8), np.float32)}
    expected = theory.of(right, first, last, "adam")
    assert not groups.not_judged(first.specs, expected)
    return check.judge(series().measure(right, batch, SEEDS), [1, 4], expected)


def branches(which: slice) -> Callable[[factors.Factors, float], None]:
    """Take the factor of depth from some branches."""

    def change(values: factors.Factors, m: float) -> None:
        values.forward["block.branch"][:, which] *= m**0.5

    return change


def rates(prefix: str, power: float) -> Callable[[factors.Factors, float], None]:
    def change(values: factors.Factors, m: float) -> None:
        for name in values.lr:
            if name.startswith(prefix):
                values.lr[name] = values.lr[name] * m**power

    return change


def test_the_right_program_passes(monkeypatch: pytest.MonkeyPatch):
    findings = judged(monkeypatch, lambda values, m: None)
    assert check.passes(findings), [finding for finding in findings if not finding.ok]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(
            branches(slice(None)),
            ["contribution contradicts theory", "block.cross.attention_out (contribution"],
            id="branches without depth",
        ),
        pytest.param(
            branches(slice(1, 2)),
            ["contribution contradicts theory", "block.cross.attention_out (contribution"],
            id="cross-attention without depth",
        ),
        pytest.param(
            rates("encoder.block", -0.5),
            ["encoder.block.query (movement)", "encoder.block.mlp_out (movement)"],
            id="encoder by the decoder's depth",
        ),
        pytest.param(
            rates("block.cross.out", 0.5),
            ["block.cross.attention_out (movement)"],
            id="rate of cross out",
        ),
        pytest.param(
            rates("embedding_norm", -0.5),
            ["by role: norm_gain (movement of embedding_norm)"],
            id="embedding norm as one of a block",
        ),
        pytest.param(
            rates("encoder.embedding_norm", -0.5),
            ["by role: encoder.norm_gain (movement of embedding_norm)"],
            id="encoder's embedding norm as one of a block",
        ),
    ],
)
def test_a_wrong_depth_rule_fails_by_the_name_of_its_role(
    monkeypatch: pytest.MonkeyPatch, change: Any, named: list[str]
):
    findings = judged(monkeypatch, change)
    line = report.verdict_line(findings)
    assert "the program does not do what its table says" in line
    assert all(name in line for name in named), line


@pytest.mark.core
def test_the_command_grows_either_stack(capsys: pytest.CaptureFixture[str]):
    words = ["check", "ed-tiny", "--preset", "depth-mup", "--preset.alpha-l", "1.0"]
    words += ["--sizes", "3", "--dry-run"]
    assert main([*words, "--grow", "depth"]) == 0
    shown = capsys.readouterr().out
    assert "width 64, 4 heads of 16, depth 8, encoder 8" in shown
    assert "gradient/encoder.block.value after 0: theory says -0.50" in shown
    assert main([*words, "--grow", "depth", "--model.encoder-depth", "3"]) == 0
    assert "depth 8, encoder 3" in capsys.readouterr().out
    assert main([*words, "--grow", "encoder_depth"]) == 0
    assert "depth 2, encoder 8" in capsys.readouterr().out
