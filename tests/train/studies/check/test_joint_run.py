"""Check of joint rules by a run's optimizer: right rules pass, and wrong values are named."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from mupax.__main__ import main
from mupax.presets.joint import NUMBERS
from mupax.train.studies.check import joint_run, judge
from scripts.check import joint_mutations
from scripts.check.joint_mutations import STUDIES, Mutant, Suite, mutants, named, row, rows_of_file

SHORT = ("--preset.base", "lm-proxy,batch=16,tokens=524288")
"""256 steps of lm-tiny's batch."""


@functools.cache
def suite() -> Suite:
    """Return a study of one doubling of the batch under `sde`.

    Mutants of all columns but the betas share its two programs.
    """
    mutations = Suite("sde", "batch", 2, SHORT)
    assert judge.passes(mutations.right())
    return mutations


def test_the_command_passes_a_right_rule_and_names_the_numbers_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "check.json"
    argv = ["check", "lm-tiny", "--grow", "batch", "--sizes", "2", "--json", str(path)]
    assert main([*argv, "--joint", "sde", *SHORT]) == 0
    out = capsys.readouterr().out
    assert "passes: " in out
    assert "all 7 observables within theory" in out
    assert "caution: the joint rule sde holds below the noise scale, which is not known here" in out
    written = json.loads(path.read_text())
    assert (written["program"], written["table"]) == ("pass", "pass")
    assert written["sizes"] == [{"batch": 16, "steps": 256}, {"batch": 32, "steps": 128}]
    assert main([*argv, "--steps", "256"]) == 1
    written = json.loads(path.read_text())
    assert (written["program"], written["table"]) == ("pass", "fail")
    out = capsys.readouterr().out
    assert (
        "the joint rule itself is wrong: by number: peak_lr "
        "(displacement by noise: frozen, drift: frozen)" in out
    )
    for number in set(NUMBERS) - {"decay_steps"}:
        assert f"{number} (" in out


@pytest.mark.parametrize(
    "column", ["lr", "weight_decay", "eps", "durations", "one_minus_b1", "one_minus_b2"]
)
def test_a_wrong_number_is_caught_and_named_alone(column: str):
    mutant = Mutant("sde", "batch", column, -0.25 if column == "one_minus_b2" else 0.25)
    findings = suite().run(mutant)
    assert named(row(mutant, findings)), [(f.observable, f.slope) for f in findings if not f.agrees]


def test_a_wrong_number_at_the_base_is_seen_there():
    mutations = suite()
    base = mutations.runs[0]
    for number, value in (
        ("peak_lr", 0.016),
        ("weight_decay", 6e-4),
        ("b1", 0.8),
        ("b2", 0.9),
        ("warmup_steps", 80),
    ):
        meant = dataclasses.replace(
            base, optimizer=dataclasses.replace(base.optimizer, **{number: value})
        )
        expected = joint_run.expectation([meant, *mutations.runs[1:]], "batch")
        wrong = {
            f.observable.partition("/")[2]
            for f in joint_run.judged(mutations.observations, expected)
            if not f.agrees
        }
        assert wrong == {number}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "lm-tiny --grow tokens --joint sde",
            "the joint rule sde says nothing about tokens; write --joint complete-d",
        ),
        (
            "lm-tiny --grow batch --joint none --optimizer sgd",
            "says nothing about sgd; write adamw",
        ),
        ("lm-tiny --grow batch --joint sde --optimizer.name muon", "says nothing about muon"),
        ("lm-tiny --grow batch --joint sde --sizes 5", "b1 would be 1 - 16 x 0.1 = -0.6"),
        (
            "lm-tiny --grow batch --joint sde --noise-scale 20",
            "holds below the noise scale, 20 examples",
        ),
        ("lm-tiny --grow batch --steps 6", "no whole number of steps"),
        (
            "lm-tiny --grow batch --optimizer.eps 0",
            "optimizer.eps is 0, and the check's gradients of that size would vanish",
        ),
        (
            "lm-proxy --grow batch",
            "lm-proxy is a model; write a recipe, such as lm-tiny --model lm-proxy",
        ),
        ("vit-s16 --grow batch", "vit-s16 is a model; write a recipe of `mupax train`"),
        (
            "lm-tiny --grow heads --joint sde",
            "check does not read --joint growing heads (--grow batch or tokens does)",
        ),
        (
            "lm-tiny --grow tokens --seeds 8",
            "--seeds has no effect with --grow tokens, which takes one run of every size",
        ),
        ("lm-tiny --grow batch --accept lazy", "check does not read --accept with --grow batch"),
        ("lm-tiny --grow heads --steps 6", "check does not read --steps; it takes --model.*"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["check", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_dry_run_has_the_numbers_of_every_run(capsys: pytest.CaptureFixture[str]):
    assert (
        main(
            [
                "check",
                "lm-tiny",
                "--grow",
                "tokens",
                "--joint",
                "complete-d",
                "--dry-run",
                "--sizes",
                "2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "batch 16, 1600 steps: peak_lr 0.005657, b1 0.95, b2 0.975, eps 1.41e-08" in out
    assert "eps over noise: theory says +0.50\n" in out  # its source lets it go


@pytest.mark.core
def test_every_mutant_of_the_committed_page_is_caught_and_blamed_alone():
    rows = rows_of_file()
    assert [(each["rule"], each["grows"], each["column"], each["exponent"]) for each in rows] == [
        dataclasses.astuple(mutant) for study in STUDIES for mutant in mutants(*study)
    ]
    assert all(named(each) for each in rows)
    assert joint_mutations.markdown(rows) in joint_mutations.PAGE.read_text()
