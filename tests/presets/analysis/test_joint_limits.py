"""Limits of joint rules as batch or tokens grow, by their values and with wrong columns."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from mupax.presets.analysis.joint_limits import OBSERVABLES, observables, troubles, verdicts
from mupax.presets.horizon import COLUMNS, RULES, formula
from mupax.presets.joint import path, scaled
from mupax.presets.rule import ONE, axis
from tests.fixtures.commands import command, output

pytestmark = pytest.mark.core

RIGHT = (("sde", "batch"), ("complete-d", "batch"), ("complete-d", "tokens"))
WORDS = {"lr": ("explodes", "frozen")}
BASE: dict[str, Any] = {
    "peak_lr": 0.01,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "b1": 0.95,
    "b2": 0.98,
    "warmup_steps": 512,
}
STEPS = 4096


def by_numbers(name: str, batch: float, tokens: float) -> dict[str, float]:
    """Return the observables from an optimizer's values and a count of steps."""
    run = scaled(name, {"batch": batch, "tokens": tokens}, "adamw", BASE)
    steps = STEPS * tokens / batch
    return {
        "displacement by noise": run["peak_lr"] * steps**0.5,
        "drift": run["peak_lr"] * steps / (1 / batch) ** 0.5,
        "decay over the run": run["peak_lr"] * run["weight_decay"] * steps,
        "memory of b1": 1 / (1 - run["b1"]) / steps,
        "memory of b2": 1 / (1 - run["b2"]) / steps,
        "eps over noise": run["eps"] / (1 / batch) ** 0.5,
        "warm-up": run["warmup_steps"] / steps,
    }


@pytest.mark.parametrize("name", ["none", "sde", "complete-d"])
def test_powers_are_those_of_the_numbers_that_the_rule_gives(name: str):
    for batch, tokens in ((4.0, 1.0), (0.25, 1.0), (1.0, 4.0), (2.0, 8.0)):
        base = by_numbers(name, 1, 1)
        expected = by_numbers(name, batch, tokens)
        expected = {row: expected[row] / base[row] for row in expected}
        powers = observables(RULES[name])
        assert {
            row: power({"batch": batch, "tokens": tokens}) for row, power in powers.items()
        } == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "powers"),
    [
        ("sde", ["T^0.5", "T", "T", "T^-1", "T^-1", "1", "1"]),
        # Noise of a batch does not depend on T, and more tokens tell more: as the source has it.
        ("complete-d", ["1", "T^0.5", "1", "1", "1", "T^0.5", "1"]),
        # The control: nothing stays where the numbers are left alone.
        ("none", ["B^-0.5 T^0.5", "B^-0.5 T", "B^-1 T", "B T^-1", "B T^-1", "B^0.5", "B T^-1"]),
    ],
)
def test_what_goes_how_under_each_rule(name: str, powers: list[str]):
    assert [formula(power) for power in observables(RULES[name]).values()] == powers


def test_words():
    none, sde, complete = ({row: (entries["batch"].verdict, entries["tokens"].verdict) for row, entries in verdicts(RULES[n]).items()}
                           for n in ("none", "sde", "complete-d"))  # fmt: skip
    assert set(sde.values()) == {
        ("stable", "explodes"),
        ("stable", "vanishes"),
        ("stable", "stable"),
    }
    assert none["displacement by noise"] == ("frozen", "explodes")
    assert none["drift"] == ("frozen", "stable")
    assert none["decay over the run"] == ("vanishes", "explodes")
    assert none["eps over noise"] == ("explodes", "stable")
    assert complete["eps over noise"] == ("stable", "explodes")
    assert [row for row, words in complete.items() if words != ("stable", "stable")] == [
        "eps over noise"
    ]


@pytest.mark.parametrize(("name", "grows"), RIGHT)
def test_right_rules_have_no_trouble_and_each_wrong_column_is_named(name: str, grows: str):
    rule = RULES[name]
    assert troubles(rule, grows) == {}
    for column in COLUMNS:
        for exponent in (0.25, -0.25, 0.5, -0.5):
            power = (getattr(rule, column) or ONE) * axis(grows) ** exponent
            wrong = troubles(dataclasses.replace(rule, **{column: power}), grows)
            if (name, grows, column) == ("complete-d", "tokens", "eps") and exponent < 0:
                assert (
                    wrong == {}
                )  # its source lets eps over noise go as T^0.5: anything between is no worse
                continue
            more = (
                ("drift",) if grows == "tokens" and exponent > -0.75 else ()
            )  # which may grow with T
            assert set(wrong) == {row for row, kind in OBSERVABLES.items() if kind == column} - set(
                more
            ), (
                column,
                exponent,
            )


def test_control_constant_numbers_are_named_column_by_column():
    assert {OBSERVABLES[row] for row in troubles(RULES["none"], "batch")} == set(COLUMNS)
    lr = dataclasses.replace(RULES["sde"], lr=None)
    assert troubles(lr, "batch") == {"displacement by noise": "frozen", "drift": "frozen"}


def rows(**options: Any) -> list[dict[str, Any]]:
    numbers: dict[str, Any] = {"batch": (8, 64), "tokens": (1, 1), "b1": 0.9, "b2": 0.95, **options}
    return path(RULES[numbers.pop("name", "sde")], **numbers)


def test_the_way_to_a_run_says_where_the_rule_holds():
    sde = rows()
    assert [row["batch"] for row in sde] == [8, 16, 32, 64]
    assert sde[-1] | {"holds": ""} == pytest.approx(
        {"batch": 64, "tokens": 1, "steps": 1 / 8, "lr": 8**0.5, "weight_decay": 8**0.5, "eps": 8**-0.5, "1-b1": 8, "1-b2": 8,
         "warm-up": 1 / 8, "tau": 1, "holds": ""}
    )  # fmt: skip
    assert {row["holds"] for row in sde} == {"yes"}
    independent = rows(decay="independent")[-1]
    assert (independent["weight_decay"], independent["tau"]) == pytest.approx(
        (8, 1)
    )  # wd is the pull, lr*wd of the coupled
    assert rows(b1=0.85)[-1]["holds"] == "1-b1 = 1.2"
    assert [row["holds"] for row in rows(noise_scale=20)] == [
        "yes",
        "yes",
        "above the noise scale",
        "above the noise scale",
    ]
    assert rows(tokens=(1, 2))[-1]["holds"] == "says nothing about tokens"
    assert rows(name="none")[-1]["holds"] == "says nothing about batch"
    assert rows(name="complete-d", tokens=(1, 2))[-1]["holds"] == "untested"
    assert [row["batch"] for row in rows(batch=(8, 20))] == [8, 16, 20]
    assert [row["batch"] for row in rows(batch=(8, 1), b1=0.99)] == [8, 4, 2, 1]


def test_limits_and_table_have_both_axes():
    out = output("presets limits mup --joint sde")
    assert re.search(r"(?m)^displacement by noise +stable +explodes T\^0\.5$", out)
    assert (
        "holds while B (1 - b1) < 1 and B (1 - b2) < 1, and for a batch well below the noise scale"
        in out
    )
    entries = json.loads(output("presets limits mup --json"))
    assert entries["drift"]["batch"] == {"exponent": -0.5, "verdict": "frozen"}
    assert entries["residual stream"]["heads"]["verdict"] == "stable"
    # Joint rules are of Adam alone.
    assert "drift" not in output("presets limits mup --optimizer sgd")
    table = "presets table mup --model lm-tiny --joint sde --batch 8:64"
    assert re.search(
        r"(?m)^ +64 +1 +0\.125 +2\.828 +2\.828 +0\.3536 +8 +8 +0\.125 +1 +yes$", output(table)
    )
    assert json.loads(output(table, "--json"))["joint"][-1]["tau"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("limits mup --joint sde --optimizer sgd", "the joint rule sde is for adam and says nothing about sgd"),
        ("limits mup --joint sdf", "--joint needs one of 'complete-d', 'completed-muon', 'none', 'sde', not 'sdf'"),
        ("table mup --model lm-tiny --joint sde --batch 8", "--batch is 8; write FROM:TO with two numbers above 0"),
        ("table mup --model lm-tiny --joint sde --optimizer muon", "says nothing about muon"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(words: str, message: str):
    done = command("presets", words)
    assert done.code == 2
    assert message in done.err
