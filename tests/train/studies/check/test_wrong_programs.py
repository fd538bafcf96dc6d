"""Programs that do not do what their table says, where a root mean square or a slope would hide it; and what the command says.

One compiled series of narrow models of twelve layers, with QK-norm, shared keys, a gated MLP and biases.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import Preset
from mupax.presets.rule import axis
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors
from mupax.train.studies.check import check, report, theory
from mupax.train.studies.check.check import Finding
from mupax.zoo import configs
from mupax.zoo.definition import definition
from mupax.zoo.transformer import transformer
from tests.train.studies.check.optimized import optimized

LAYERS, SEEDS = 12, 3
SMALL = [
    "--model.width",
    "32",
    "--model.num-heads",
    "4",
    "--model.vocab-size",
    "16",
    "--model.seq-len",
    "8",
]


@functools.cache
def series() -> check.Series:
    model = dataclasses.replace(
        transformer(configs.get("lm-proxy"), "a test"),
        width=32, num_heads=4, num_kv_heads=2, depth=LAYERS, qk_norm=True, bias=True, vocab_size=32, seq_len=8,  # pyright: ignore
    )  # fmt: skip
    grown = check.grow(
        model, "heads", 3, {"width", "num_heads", "num_kv_heads", "depth", "vocab_size", "seq_len"}
    )
    adam = OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    return optimized(
        check.Series([definition(one) for one in (grown[0], grown[-1])], adam, steps=1)
    )  # ends have the slope


def right(base: dict[str, int] | None = None) -> Preset:
    sizes = series().definitions[0].sizes
    own = {
        name: sizes[name] for name in ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers")
    }
    return presets.get("depth-mup", base={**own, **(base or {})})


def judged(trained: Preset) -> list[Finding]:
    """Train one table, ask theory about the right one."""
    definitions = series().definitions
    expected = theory.of(right(), definitions[0], definitions[-1], "adam")
    return check.judge(series().measure(trained, BATCH(), SEEDS), [1, 4], expected)


@functools.cache
def BATCH() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (8, 9)).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((8, 8), np.float32),
    }


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {f"{f.observable} @{f.step}": f.verdict for f in findings if not f.ok}


def test_the_right_program_passes():
    findings = judged(right())
    assert check.passes(findings), wrong(findings)
    assert {
        f"{what}/block.{name}.norm_gain"
        for what in ("weight", "movement", "gradient")
        for name in ("query", "key")
    } <= {f.observable for f in findings}


Change = Callable[[factors.Factors, float], None]


def resolved(monkeypatch: pytest.MonkeyPatch, change: Change) -> list[Finding]:
    """The right table, and a program that gets other numbers: `change` has them and the width over the base's."""
    resolve = factors.resolve

    def changed(preset: Preset, model, *args):
        numbers = resolve(preset, model, *args)
        change(numbers, model.sizes["embed"] / series().definitions[0].sizes["embed"])
        return numbers

    monkeypatch.setattr(factors, "resolve", changed)
    return judged(right())


def in_layer(name: str, column: str, power: float, layer: int = 7) -> Change:
    def change(numbers: factors.Factors, m: float) -> None:
        numbers_of_layers = getattr(numbers, column)
        numbers_of_layers[name] = np.array(numbers_of_layers[name])
        numbers_of_layers[name][layer] *= m**power

    return change


@pytest.mark.parametrize(
    ("change", "where", "by_rms"),
    [
        (in_layer("block.mlp.down", "lr", -0.5), "movement/block.mlp_out @1", "block.mlp_out (movement in layer 7)"),
        (in_layer("block.attention.key", "lr", -1.0), "movement/block.key @1", "block.key (movement in layer 7)"),
        (in_layer("block.attention.value", "multiplier", -0.5), "weight/block.value @0", "weight in layer 7"),
        (in_layer("block.attention.out", "eps", -1.0), "gradient/block.attention_out @0", "gradient in layer 7"),
        (in_layer("block.mlp_norm.gain", "lr", -1.0), "movement/block.norm_gain/mlp_norm @1", "movement of mlp_norm in layer 7"),
        (in_layer("block.attention.logit_scale", "forward", 0.5), "attention @0", "attention contradicts theory in layer 7"),
    ],
)  # fmt: skip
def test_one_layer_of_twelve_is_seen_and_named(
    monkeypatch: pytest.MonkeyPatch, change: Change, where: str, by_rms: str
):
    findings = resolved(monkeypatch, change)
    assert wrong(findings)[where] == "contradicts theory in layer 7"
    line = report.verdict_line(findings)
    assert "the program does not do what its table says" in line
    assert by_rms in line
    # A slope of the root mean square over layers is inside its band.
    finding = next(f for f in findings if f"{f.observable} @{f.step}" == where)
    assert dataclasses.replace(finding, layer=None).agrees


def test_a_gate_is_told_apart_from_its_up_projection(monkeypatch: pytest.MonkeyPatch):
    def change(numbers: factors.Factors, m: float) -> None:
        numbers.lr["block.mlp.gate"] *= m**-0.5

    findings = resolved(monkeypatch, change)
    assert wrong(findings)["movement/block.mlp_in/gate @1"] == "contradicts theory"
    assert "by role: block.mlp_in (movement of gate)" in report.verdict_line(findings)


@pytest.mark.parametrize(
    ("base", "where"),
    [
        ({"mlp": 40}, "movement/block.mlp_out @1"),
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
    table = right()

    def rule(spec):
        row = table.rule(spec)
        return (
            dataclasses.replace(row, adam=row.adam * 1e-30)
            if spec.group == "token_embedding"
            else row
        )

    broken = dataclasses.replace(table, rule=rule)
    definitions = series().definitions
    expected = theory.of(
        broken, definitions[0], definitions[-1], "adam"
    )  # of itself, which names no exponent
    findings = check.judge(series().measure(broken, BATCH(), SEEDS), [1, 4], expected)
    assert wrong(findings)["movement/token_embedding @1"] == "frozen"


def test_a_table_that_is_wrong_and_followed_fails_by_the_second_verdict(tmp_path: Path):
    table = right()

    def rule(spec):
        row = table.rule(spec)
        return (
            dataclasses.replace(row, adam=row.adam / axis("embed"))
            if spec.group == "block.mlp_out"
            else row
        )

    definitions = series().definitions
    broken = dataclasses.replace(table, rule=rule)
    expected = theory.of(broken, definitions[0], definitions[-1], "adam")
    findings = check.judge(series().measure(broken, BATCH(), SEEDS), [1, 4], expected)
    findings = [
        f for f in findings if f.observable != "change logits"
    ]  # narrow, and eight positions long: it strays
    assert wrong(findings) == {"movement/block.mlp_out @1": "frozen"}
    assert (
        "fails[/bold red]: the table itself is wrong: by role: block.mlp_out (movement: frozen)"
        in report.verdict_line(findings)
    )
    row = report.to_json(findings, {"model": "m"}, ["gradient/x"])
    assert [row[key] for key in ("verdict", "program", "table", "not_judged")] == [
        "fail",
        "pass",
        "fail",
        ["gradient/x"],
    ]
    assert report.verdict_line([f for f in findings if f.ok], ["gradient/x"]).endswith(
        "; not judged: gradient/x"
    )


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
    words = [
        "--model.qk-norm",
        "--model.depth",
        "5",
        "--model.num-kv-heads",
        "1",
        "--grow",
        "heads",
        "--sizes",
        "3",
    ]
    assert main(["check", "lm-tiny", "--dry-run", "--optimizer", "sgd", *words]) == 0
    out = capsys.readouterr().out
    assert "width 64, 4 heads of 16, depth 5" in out
    assert "gradient/block.query.norm_gain after 0" in out
    # A recipe's own preset: u-mup's numbers for lm-tiny would be absolute, mup's are those of the flags' default.
    assert main(["check", "bordelon-lm", "--dry-run", "--sizes", "3", "--grow", "depth"]) == 0
    assert "change residual after 1: theory says +0.00\n" in capsys.readouterr().out


@pytest.mark.core
def test_constants_of_groups_change_no_expectation(capsys: pytest.CaptureFixture[str]):
    words, tuned = (
        ["check", "lm-proxy", "--dry-run", "--sizes", "3"],
        ["--preset.rates.readout", "4", "--preset.stds.query=2"],
    )
    shown = []
    for flags in ([], tuned):
        assert main([*words, *flags]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_lazy_fails_and_is_accepted_by_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    instances: list[check.Series] = []

    class Once(check.Series):
        """Both commands measure the same programs."""

        def __new__(cls, *args):
            return instances[0] if instances else super().__new__(cls)

        def __init__(self, definitions, config, steps=1):
            if not instances:
                super().__init__(definitions, config, 1)
                instances.append(self)

    monkeypatch.setattr(check, "Series", Once)
    words = [
        "check",
        "lm-tiny",
        "--preset",
        "ntk",
        "--grow",
        "heads",
        "--sizes",
        "3",
        "--seeds",
        "2",
        *SMALL,
    ]
    out = tmp_path / "check.json"
    assert main([*words, "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "the table itself is wrong: by role:" in shown.replace("\n", " ")
    row = json.loads(out.read_text())
    assert (row["verdict"], row["program"], row["table"]) == ("fail", "pass", "fail")
    assert {o["verdict"] for o in row["observables"] if not o["ok"]} == {"lazy"}
    assert main([*words, "--accept", "lazy"]) == 0
    shown = capsys.readouterr().out
    assert "passes: ntk follows its table as heads grow" in shown
    assert "by its source the preset lets features go as -0.50" in shown
