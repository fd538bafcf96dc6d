"""The joint rule of Muon has one column for its matrices and one for the parameters left to Adam."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mupax.presets import PresetError, joint
from mupax.presets.analysis.joint_limits import observables, verdicts
from mupax.presets.horizon import RULES, formula
from mupax.presets.joint import path, scaled
from tests.fixtures.commands import output
from tests.presets.test_horizon import grown

pytestmark = pytest.mark.core

NAME = "completed-muon"
BASE: dict[str, Any] = {
    "peak_lr": 0.02, "adam_lr": 0.005, "weight_decay": 0.1, "eps": 1e-8, "b1": 0.9, "b2": 0.99,
    "warmup_steps": 64, "decay_steps": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "tokens"), [(4.0, 1.0), (1.0, 16.0), (4.0, 16.0), (0.25, 1.0), (4.0, 4.0)]
)
def test_each_part_has_its_own_column(batch: float, tokens: float) -> None:
    there = scaled(NAME, grown(batch, tokens), "muon", BASE)
    assert there["peak_lr"] == pytest.approx(0.02 * batch**0.5 * tokens**-0.3)
    assert there["adam_lr"] == pytest.approx(0.005 * (batch / tokens) ** 0.5)
    assert there["eps"] == pytest.approx(1e-8 * (tokens / batch) ** 0.5)
    assert there["b2"] == pytest.approx(1 - 0.01 * batch)
    assert there["warmup_steps"] == round(64 * tokens / batch)
    for unchanged in ("b1", "weight_decay", "decay_steps"):
        assert there[unchanged] == BASE[unchanged]


@pytest.mark.parametrize(("batch", "tokens"), [(4.0, 1.0), (1.0, 16.0), (4.0, 4.0)])
def test_one_shared_peak_is_split(batch: float, tokens: float) -> None:
    """Else the Adam part would follow the column of the matrices. Under B = T it has a factor of 1."""
    one = {**BASE, "adam_lr": None}
    there = scaled(NAME, grown(batch, tokens), "muon", one)
    assert there["peak_lr"] == pytest.approx(0.02 * batch**0.5 * tokens**-0.3)
    assert there["adam_lr"] == pytest.approx(0.02 * (batch / tokens) ** 0.5)


def test_nothing_changes_at_the_base() -> None:
    for numbers in (BASE, {**BASE, "adam_lr": None}):
        assert scaled(NAME, grown(1.0, 1.0), "muon", numbers) == numbers
    # The control: a rule without columns leaves one peak as it is.
    assert scaled("none", grown(4.0, 1.0), "muon", {**BASE, "adam_lr": None})["adam_lr"] is None


def test_rules_of_adam_leave_a_second_peak_alone() -> None:
    there = scaled("sde", grown(4.0, 1.0), "adamw", BASE)
    assert there["adam_lr"] == BASE["adam_lr"]
    assert "Adam part's lr" not in path(RULES["sde"], (8, 16), (1, 1), b1=0.9, b2=0.95)[0]


@pytest.mark.parametrize(
    ("name", "batch", "optimizer", "message"),
    [
        ("sde", 4.0, "muon", "is for adam and says nothing about muon; write joint comp"),
        (NAME, 4.0, "adamw", "is for muon and says nothing about adamw; write joint sde"),
        (NAME, 200.0, "muon", "b2 would be"),
        ("sde", 4.0, "adamm", "no optimizer is named 'adamm'; write one of"),
    ],
)
def test_refusals_name_what_fits(name: str, batch: float, optimizer: str, message: str) -> None:
    with pytest.raises(PresetError, match=message):
        scaled(name, grown(batch, 1.0), optimizer, BASE)


def test_what_each_part_does_as_batch_and_tokens_grow() -> None:
    """Against the numbers that the rule gives: distances in units of the weights, shares of the run."""
    matrices = observables(RULES[NAME])
    adam_part = observables(RULES[NAME].of_adam_part)
    steps = 4096
    for batch, tokens in ((4.0, 1.0), (1.0, 4.0), (2.0, 8.0)):
        there = scaled(NAME, grown(batch, tokens), "muon", BASE)
        growth = tokens / batch
        for powers, peak in ((matrices, "peak_lr"), (adam_part, "adam_lr")):
            ratio = there[peak] / BASE[peak]
            expected = {
                "displacement by noise": ratio * growth**0.5,
                "drift": ratio * growth * batch**0.5,
                "decay over the run": ratio * growth,
                "warm-up": there["warmup_steps"] / BASE["warmup_steps"] / growth,
            }
            for name, value in expected.items():
                assert powers[name](grown(batch, tokens)) == pytest.approx(value, rel=0.02), name
        memory = 1 / (1 - there["b2"]) / (steps * growth)
        at_base = 1 / (1 - BASE["b2"]) / steps
        assert adam_part["memory of b2"](grown(batch, tokens)) == pytest.approx(memory / at_base)
    assert set(matrices) < set(adam_part)
    assert formula(matrices["displacement by noise"]) == "T^0.2"
    assert formula(adam_part["displacement by noise"]) == "1"


def test_control_one_column_for_both_parts_moves_the_adam_part_too_far() -> None:
    """A quarter of what it is about: noise then moves these parameters as T^0.2."""
    rule = RULES[NAME]
    shared = verdicts(rule)["displacement by noise"]["tokens"]
    own = verdicts(rule.of_adam_part)["displacement by noise"]["tokens"]
    assert (shared.exponent, shared.verdict) == (0.2, "explodes")
    assert (own.exponent, own.verdict) == (0, "stable")


def test_commands_show_both_columns() -> None:
    out = output("presets joint --batch 8:32 --tokens 1:16")
    assert re.search(
        rf"(?m)^{NAME} +B\^0\.5 T\^-0\.3 +B\^0\.5 T\^-0\.5 +B\^-0\.5 T\^0\.5 +B +", out
    )
    assert re.search(rf"(?m)^{NAME} +0\.871 +0\.5 +2 +4 +4$", out)
    assert re.search(rf"(?m)^Adam part of {NAME} +1 +T\^0\.5 ", out)

    rows = {row["name"]: row for row in json.loads(output("presets joint --json"))}
    assert (rows[NAME]["lr"], rows[NAME]["adam_lr"]) == ("B^0.5 T^-0.3", "B^0.5 T^-0.5")
    assert rows["sde"]["adam_lr"] is None

    limits = f"presets limits mup --optimizer muon --joint {NAME}"
    out = output(limits)
    assert f"under the joint rule {NAME}\n" in out
    assert f"under the joint rule Adam part of {NAME}\n" in out
    entries = json.loads(output(limits, "--json"))
    assert entries["displacement by noise"]["tokens"]["exponent"] == 0.2
    assert entries["displacement by noise, Adam part"]["tokens"]["exponent"] == 0

    table = f"presets table mup --model lm-tiny --base lm-proxy --optimizer muon --joint {NAME}"
    out = output(table, "--batch 8:32 --tokens 1:16")
    assert "Adam part's lr" in out
    assert out.rstrip().splitlines()[-1].split()[3:5] == ["0.8706", "0.5"]


def test_no_rule_is_for_every_optimizer() -> None:
    assert joint.of("none", "adamm").name == "none"
