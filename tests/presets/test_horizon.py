"""Joint rules: formulas against numbers by hand, what holds of all rules, and refusals."""

from __future__ import annotations

import json
import math
import re
from typing import Any, get_args, get_type_hints

import pytest

from mupax.presets import PresetError
from mupax.presets.horizon import COLUMNS, RULES, Applied, rule
from mupax.presets.joint import NUMBERS, scaled, timescale
from mupax.train.config.run import PresetConfig
from tests.fixtures.commands import command, output

pytestmark = pytest.mark.core

BASE = {
    "peak_lr": 0.008, "weight_decay": 0.1, "eps": 1e-8, "b1": 0.9, "b2": 0.95, "warmup_steps": 64, "decay_steps": 128,
}  # fmt: skip
APPLIED = [
    name
    for name, joint_rule in RULES.items()
    if joint_rule.applied and "adam" in joint_rule.families
]
OF_MUON = ["completed-muon"]
"""Rules of Muon, which `test_joint_muon` is about."""

# At four times the batch; four times the batch and nine times the tokens; nine times the tokens.
BY_HAND: dict[str, list[dict[str, float]]] = {
    "none": [{}, {}, {}],
    "sde": [
        {"peak_lr": 0.016, "weight_decay": 0.2, "eps": 0.5e-8, "b1": 0.6, "b2": 0.8, "warmup_steps": 16, "decay_steps": 32},
        {"peak_lr": 0.016, "weight_decay": 0.2, "eps": 0.5e-8, "b1": 0.6, "b2": 0.8, "warmup_steps": 144, "decay_steps": 288},
        {"warmup_steps": 576, "decay_steps": 1152},
    ],
    "complete-d": [
        {"peak_lr": 0.016, "weight_decay": 0.2, "eps": 0.5e-8, "b1": 0.6, "b2": 0.8, "warmup_steps": 16, "decay_steps": 32},
        {"peak_lr": 0.008 * 2 / 3, "weight_decay": 0.2 / 3, "eps": 1.5e-8, "b1": 1 - 0.4 / 9, "b2": 1 - 0.2 / 9,
         "warmup_steps": 144, "decay_steps": 288},
        {"peak_lr": 0.008 / 3, "weight_decay": 0.1 / 3, "eps": 3e-8, "b1": 1 - 0.1 / 9, "b2": 1 - 0.05 / 9,
         "warmup_steps": 576, "decay_steps": 1152},
    ],
}  # fmt: skip
SHOWN = {
    "linear": {"lr": 4.0},
    "b2-half-life": {"one_minus_b2": 4.0},
    "horizon": {"lr": 9**-0.32},
    "sqrt-horizon": {"lr": 1 / 3},
    "step-law": {"lr": 9**0.307},
    "deepseek": {"lr": 9**-0.125},
    "timescale": {"weight_decay": 4 / 9},
    "power-lines": {"weight_decay": 4 * 9**-0.48},
}
"""At four times the batch and nine times the tokens."""


def grown(batch: float, tokens: float = 1.0) -> dict[str, float]:
    return {"batch": batch, "tokens": tokens}


def ours(
    name: str, ratios: dict[str, float], numbers: dict[str, Any] = BASE, **options: Any
) -> dict[str, Any]:
    return scaled(name, ratios, "adamw", numbers, **options)


@pytest.mark.parametrize("name", APPLIED)
def test_applied_rules_give_the_numbers_worked_out_by_hand(name: str):
    for ratios, expected in zip((grown(4), grown(4, 9), grown(1, 9)), BY_HAND[name], strict=True):
        assert ours(name, ratios) == pytest.approx({**BASE, **expected}, rel=1e-12)


def test_shown_rules_are_the_sources_formulas():
    assert set(SHOWN) | {*APPLIED, *OF_MUON} == set(RULES)
    for name, expected in SHOWN.items():
        factors = {column: RULES[name].factor(column, grown(4, 9)) for column in COLUMNS}
        assert factors == pytest.approx({**dict.fromkeys(COLUMNS, 1.0), **expected})


@pytest.mark.parametrize("name", APPLIED)
def test_a_rule_changes_nothing_at_the_base_composes_and_inverts(name: str):
    assert ours(name, grown(1)) == BASE  # to the bit
    for decay in ("coupled", "independent"):
        values = ours(name, grown(2, 4), decay=decay)
        assert ours(name, grown(2, 0.5), values, decay=decay) == pytest.approx(
            ours(name, grown(4, 2), decay=decay), rel=1e-12
        )
        assert ours(name, grown(0.5, 0.25), values, decay=decay) == pytest.approx(BASE, rel=1e-12)


@pytest.mark.parametrize("decay", ["coupled", "independent"])
@pytest.mark.parametrize(
    ("name", "tokens"), [("sde", 1.0), ("complete-d", 1.0), ("complete-d", 8.0)]
)
def test_the_decay_averages_over_the_same_share_of_the_run(name: str, tokens: float, decay: str):
    def share(batch: float, tokens: float, numbers: dict[str, Any]) -> float:
        return timescale(
            numbers["peak_lr"], numbers["weight_decay"], round(4096 * tokens / batch), decay
        )

    for batch in (1 / 8, 4.0):
        values = share(batch, tokens, ours(name, grown(batch, tokens), decay=decay))
        assert values == pytest.approx(share(1, 1, BASE))
        # The control: the rate's rule alone, decay left as it is.
        assert share(batch, tokens, BASE) != pytest.approx(share(1, 1, BASE), rel=0.1)
    assert timescale(0.01, 0.1, 4000) == pytest.approx(0.25)


def test_flags_take_the_rules_that_can_be_applied():
    flag = get_type_hints(PresetConfig, include_extras=True)["joint"]
    assert [*get_args(Applied)] == [*APPLIED, *OF_MUON] == [*get_args(get_args(flag)[0])]


@pytest.mark.parametrize(
    ("name", "ratios", "numbers", "message"),
    [
        ("sde", grown(10.001), {}, "sde cannot go to 10 times the base's batch"),
        ("sde", grown(16), {}, "b1 would be 1 - 16 x 0.1 = -0.6, not in (0, 1)"),
        ("sde", grown(16), {}, "below 10, or a base nearer"),
        ("complete-d", grown(1, 0.04), {"b1": 0.99}, "b2 would be"),
    ],
)
def test_a_beta_outside_of_0_to_1_is_refused(
    name: str, ratios: dict[str, float], numbers: dict[str, float], message: str
):
    with pytest.raises(PresetError, match=re.escape(message)):
        ours(name, ratios, {**BASE, **numbers})


def test_control_betas_just_inside_are_taken():
    ours("sde", grown(9.99))
    ours("sde", grown(1), {**BASE, "b1": 0.0})


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "muon", "lion"])
def test_a_rule_of_adam_is_for_no_other_optimizer(optimizer: str):
    message = f"the joint rule sde is for adam and says nothing about {optimizer}"
    with pytest.raises(PresetError, match=message):
        scaled("sde", grown(2), optimizer, BASE)
    assert scaled("none", grown(2), optimizer, BASE) == BASE


def test_a_name_of_no_applied_rule_is_refused():
    with pytest.raises(PresetError, match="sde3 does not exist; did you mean sde"):
        rule("sde3")
    message = "step-law is only shown, beside rules that contradict it"
    with pytest.raises(PresetError, match=message):
        rule("step-law")


def test_cautions_are_said_outside_the_tested_range_only():
    assert rule("sde").cautions(grown(16)) == rule("sde").cautions(grown(1 / 16)) == []
    assert rule("none").cautions(grown(1)) == []
    (far,) = rule("sde").cautions(grown(17))
    assert "17 times the base's batch, and it was tested from 0.0625 to 16 times" in far
    assert "says nothing about tokens" in rule("sde").cautions(grown(1, 2))[0]
    assert "is not known" in rule("complete-d").cautions(grown(1, 2))[0]


def test_the_command_shows_every_rule():
    out = output("presets joint --batch 8:64 --tokens 1:8")
    for name, joint_rule in RULES.items():
        assert len(re.findall(rf"(?m)^{name}(?![-\w])", out)) == 3 + joint_rule.applied, name
        assert joint_rule.status in out
    assert "factors at B = 8, T = 8" in out
    assert re.search(r"(?m)^sde +2\.83 +2\.83 +0\.354 +8 +8 +1$", out)
    assert (
        "caution: the joint rule sde: 8 times the base's tokens, and it says nothing about tokens"
        in out
    )
    far = "presets joint --batch 8:128"
    assert "b1 would be 1 - 16 x 0.1" in output(far)
    assert "would be" not in output(far, "--b1 0.95 --b2 0.99")
    rows = {row["name"]: row for row in json.loads(output("presets joint --json --batch 1:4"))}
    assert (rows["sde"]["lr"], rows["sde"]["factors"]["eps"]) == ("B^0.5", 0.5)
    assert rows["linear"]["eps"] is None


@pytest.mark.parametrize("text", ["8", "8:x", "0:4", "1:inf", "8:64:2", ""])
def test_the_command_refuses_what_is_no_ratio(text: str):
    done = command(f"presets joint --batch '{text}'")
    assert done.code == 2
    assert f"--batch is {text}; write FROM:TO with two numbers above 0, as 8:64" in done.err


def test_every_number_has_a_column_and_every_column_a_number():
    assert set(NUMBERS.values()) == set(COLUMNS)
    assert all(
        math.isfinite(joint_rule.factor(c, grown(3, 5)))
        for joint_rule in RULES.values()
        for c in COLUMNS
    )
