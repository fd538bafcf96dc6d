"""Programs that do not do what their table says, where a mean or a slope would hide it.

One series of narrow models of nine layers has QK-norm, shared keys, a gated MLP and biases.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import ParamSpec, Power, Preset, Rule
from mupax.presets.rule import axis
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors
from mupax.train.studies.check import check, report, theory
from mupax.train.studies.check.check import Finding
from mupax.zoo import configs
from mupax.zoo.definition import definition
from mupax.zoo.transformer import transformer
from scripts.check.mutants import Mutant

LAYERS = 9
SEEDS = 3
WRITTEN = ("width", "num_heads", "num_kv_heads", "mlp_ratio", "depth", "vocab_size", "seq_len")


@functools.cache
def series() -> check.Series:
    model = dataclasses.replace(
        transformer(configs.get("lm-proxy"), "a test"),
        width=32, num_heads=4, num_kv_heads=2, mlp_ratio=1.0, depth=LAYERS, qk_norm=True, bias=True, vocab_size=32, seq_len=8,  # pyright: ignore
    )  # fmt: skip
    grown = check.grow(model, "heads", 3, WRITTEN)
    adam = OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    # The ends have the slope.
    return check.Series([definition(grown[0]), definition(grown[-1])], adam, steps=1)


def right(base: dict[str, int] | None = None) -> Preset:
    sizes = series().definitions[0].sizes
    own = {
        name: sizes[name] for name in ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers")
    }
    return presets.get("depth-mup", base={**own, **(base or {})})


def judged(trained: Preset, meant: Preset | None = None) -> list[Finding]:
    """Train one table, and judge it by the theory of `meant`, the right one by default."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (8, 9)).astype(np.int32)
    weights = np.ones((8, 8), np.float32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    first, last = series().definitions
    expected = theory.of(meant or right(), first, last, "adam")
    return check.judge(series().measure(trained, batch, SEEDS), [1, 4], expected)


def with_rate(group: str, factor: Power | float) -> Preset:
    """Return the right table with a wrong learning rate of one group."""
    table = right()

    def rule(spec: ParamSpec) -> Rule:
        row = table.rule(spec)
        if spec.group != group:
            return row
        return dataclasses.replace(row, adam=row.adam * factor)

    return dataclasses.replace(table, rule=rule)


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {f"{f.observable} @{f.step}": f.verdict for f in findings if not f.ok}


def test_the_right_program_passes():
    findings = judged(right())
    assert check.passes(findings), wrong(findings)
    observables = {finding.observable for finding in findings}
    for kind in ("weight", "movement", "gradient"):
        for name in ("query", "key"):
            assert f"{kind}/block.{name}.norm_gain" in observables


Change = Callable[[factors.Factors, float], None]


def resolved(monkeypatch: pytest.MonkeyPatch, change: Change) -> list[Finding]:
    """Judge a program that gets other values than the right table has.

    Args:
        change: Function that changes the factors. It also gets the width over the base's.
    """
    resolve = factors.resolve
    base_width = series().definitions[0].sizes["embed"]

    def changed(preset: Preset, model, *args):
        resolved_factors = resolve(preset, model, *args)
        change(resolved_factors, model.sizes["embed"] / base_width)
        return resolved_factors

    monkeypatch.setattr(factors, "resolve", changed)
    return judged(right())


def in_layer(name: str, column: str, power: float, layer: int = 7) -> Change:
    def change(values: factors.Factors, m: float) -> None:
        by_parameter = getattr(values, column)
        by_parameter[name] = np.array(by_parameter[name])
        by_parameter[name][layer] *= m**power

    return change


MISTAKES_IN_ONE_LAYER = {
    # Adam's first step moves a parameter by its rate, whatever the others do, and so small an eps
    # changes no step.
    "rates and eps": [
        (
            in_layer("block.mlp.down", "lr", -0.5),
            "movement/block.mlp_out @1",
            "block.mlp_out (movement in layer 7)",
        ),
        (
            in_layer("block.attention.key", "lr", -1.0),
            "movement/block.key @1",
            "block.key (movement in layer 7)",
        ),
        (
            in_layer("block.attention.out", "eps", -1.0),
            "gradient/block.attention_out @0",
            "gradient in layer 7",
        ),
        (
            in_layer("block.mlp_norm.gain", "lr", -1.0),
            "movement/block.norm_gain/mlp_norm @1",
            "movement of mlp_norm in layer 7",
        ),
    ],
    "multiplier": [
        (
            in_layer("block.attention.value", "multiplier", -0.5),
            "weight/block.value @0",
            "weight in layer 7",
        ),
    ],
    "scale of logits": [
        (
            in_layer("block.attention.logit_scale", "forward", 0.5),
            "attention @0",
            "attention contradicts theory in layer 7",
        ),
    ],
}


@pytest.mark.parametrize("mistakes", MISTAKES_IN_ONE_LAYER.values(), ids=MISTAKES_IN_ONE_LAYER)
def test_one_layer_of_nine_is_seen_and_named(
    monkeypatch: pytest.MonkeyPatch, mistakes: list[tuple[Change, str, str]]
):
    def change(values: factors.Factors, m: float) -> None:
        for mistake, _, _ in mistakes:
            mistake(values, m)

    findings = resolved(monkeypatch, change)
    line = report.verdict_line(findings)
    assert "the program does not do what its table says" in line
    for _, where, by_rms in mistakes:
        assert wrong(findings)[where] == "contradicts theory in layer 7"
        assert by_rms in line
        # A slope of the root mean square over layers is inside its band.
        finding = next(f for f in findings if f"{f.observable} @{f.step}" == where)
        assert dataclasses.replace(finding, layer=None).agrees


def test_a_gate_is_told_apart_from_its_up_projection(monkeypatch: pytest.MonkeyPatch):
    def change(values: factors.Factors, m: float) -> None:
        values.lr["block.mlp.gate"] *= m**-0.5

    findings = resolved(monkeypatch, change)
    assert wrong(findings)["movement/block.mlp_in/gate @1"] == "contradicts theory"
    assert "by role: block.mlp_in (movement of gate)" in report.verdict_line(findings)


@pytest.mark.parametrize(
    ("base", "where"),
    [
        ({"mlp": 16}, "movement/block.mlp_out @1"),
        ({"embed": 64}, "movement/block.value @1"),
        ({"layers": 3}, "movement/readout @1"),
    ],
)
def test_a_program_with_another_base_has_the_right_slopes_and_the_wrong_sizes(
    base: dict[str, int], where: str
):
    findings = judged(right(base))
    verdict = wrong(findings)[where]
    assert "at the smallest size" in verdict
    finding = next(f for f in findings if f"{f.observable} @{f.step}" == where)
    assert dataclasses.replace(finding, base=1.0).ok


def test_what_a_constant_freezes_is_frozen():
    broken = with_rate("token_embedding", 1e-30)
    findings = judged(broken, meant=broken)  # its own theory, which names no exponent
    assert wrong(findings)["movement/token_embedding @1"] == "frozen"


def test_a_table_that_is_wrong_and_followed_fails_by_the_second_verdict():
    broken = with_rate("block.mlp_out", axis("embed") ** -1.0)
    findings = judged(broken, meant=broken)
    # Changes of logits stray in a model so narrow, at eight positions.
    findings = [finding for finding in findings if finding.observable != "change logits"]
    assert wrong(findings) == {"movement/block.mlp_out @1": "frozen"}
    line = report.verdict_line(findings)
    words = "fails[/bold red]: the table itself is wrong: by role: block.mlp_out (movement: frozen)"
    assert words in line
    record = report.to_json(findings, {"model": "m"}, ["gradient/x"])
    assert [record[key] for key in ("verdict", "program", "table")] == ["fail", "pass", "fail"]
    assert record["not_judged"] == ["gradient/x"]
    passing = [finding for finding in findings if finding.ok]
    assert report.verdict_line(passing, ["gradient/x"]).endswith("; not judged: gradient/x")


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lm-tny"], "no model or recipe is named 'lm-tny'; did you mean lm-tiny"),
        (["vit-digitz"], "did you mean vit-digits?"),
        (
            ["lm-tiny", "--model.qk-nrm"],
            "no flag is named --model.qk-nrm; did you mean --model.qk-norm?",
        ),
        (
            ["lm-tiny", "--data.name", "digits"],
            "check does not read --data.name; it takes --model.*",
        ),
        (["lm-tiny", "--preset", "mupp"], "did you mean 'mup'?"),
        (["lm-proxy", "--preset", "mup", "--accept", "lazy"], "mup wants no lazy limit"),
        (
            ["lm-proxy", "--preset.rates.reedout", "4"],
            "rates.reedout: no parameter group is named 'reedout'; did you mean",
        ),
        (["lm-proxy", "--accept", "frozen"], "lazy"),
        (["lm-proxy", "--desiderata", "--grow", "depth"], "--grow has no effect with --desiderata"),
        (
            ["lm-proxy", "--desiderata", "--figure-panels", "a.png"],
            "--figure-panels has no effect with --desiderata",
        ),
        (
            ["lm-proxy", "--desiderata", "--optimizer", "adam"],
            "--optimizer has no effect with --desiderata, which grows every dimension at the first",
        ),
        (
            ["vit-proxy", "--model.width", "34"],
            "model.width 34 is not divisible by model.num_heads 4",
        ),
    ],
)
def test_wrong_words_get_the_nearest(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["check", *words, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


@pytest.mark.core
def test_a_recipe_brings_its_model_and_flags_change_it(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "vit-digits", "--dry-run", "--sizes", "3"]) == 0
    out = capsys.readouterr().out
    assert "movement/patch_embedding after 1" in out
    assert "norm_gain/block" not in out
    words = "--model.qk-norm --model.depth 5 --model.num-kv-heads 1 --grow heads --sizes 3"
    assert main(["check", "lm-tiny", "--dry-run", "--optimizer", "sgd", *words.split()]) == 0
    out = capsys.readouterr().out
    assert "width 64, 4 heads of 16, depth 5" in out
    assert "gradient/block.query.norm_gain after 0" in out
    # A recipe brings its own preset.
    assert main(["check", "bordelon-lm", "--dry-run", "--sizes", "3", "--grow", "depth"]) == 0
    assert "change residual after 1: theory says +0.00\n" in capsys.readouterr().out


@pytest.mark.core
def test_constants_of_groups_change_no_expectation(capsys: pytest.CaptureFixture[str]):
    words = ["check", "lm-proxy", "--dry-run", "--sizes", "3"]
    tuned = ["--preset.rates.readout", "4", "--preset.stds.query=2"]
    shown = []
    for flags in ([], tuned):
        assert main([*words, *flags]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@functools.cache
def sharp() -> tuple[check.Series, Preset, dict[str, np.ndarray]]:
    """Return a series that grows in head_dim, `mup` with attention logits of 3 at the base, a batch."""
    model = dataclasses.replace(
        transformer(configs.get("lm-proxy"), "a test"),
        mlp_ratio=1.0, vocab_size=64, seq_len=64,  # pyright: ignore
    )  # fmt: skip
    grown = check.grow(model, "head_dim", 3, {"vocab_size", "seq_len"})
    adam = OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    ends = [definition(grown[0]), definition(grown[-1])]
    preset = presets.get("mup", base=grown[0].base_sizes(), c_a=3)
    return check.Series(ends, adam, steps=1), preset, check.batch(grown[0])


def sharply(trained: Preset) -> list[Finding]:
    """Judge a table by theory of the right one, whose attention is sharp at the base."""
    trained_series, preset, batch = sharp()
    first, last = trained_series.definitions
    expected = theory.of(preset, first, last, "adam")
    return check.judge(trained_series.measure(trained, batch, SEEDS), [1, 4], expected)


def test_attention_that_is_sharp_at_the_base_passes():
    findings = sharply(sharp()[1])
    assert check.passes(findings), wrong(findings)
    # Without the room for attention that becomes less sharp, this would contradict theory.
    (finding,) = [f for f in findings if f.observable == "gradient/token_embedding"]
    assert finding.slope < -0.25


@pytest.mark.parametrize(
    ("column", "row"),
    [("init_std", "weight/{} @0"), ("lr", "movement/{} @1"), ("multiplier", "weight/{} @0")],
)
def test_control_a_wrong_rule_beside_sharp_attention_fails(column: str, row: str):
    # A mistake in one of these columns changes no such row of another group.
    groups = ("block.value", "block.attention_out", "token_embedding")
    preset = sharp()[1]
    for group in groups:
        preset = Mutant(group, column, 0.25, "head_dim").of(preset)
    failed = wrong(sharply(preset))
    assert {row.format(group) for group in groups} <= failed.keys()
