"""Committed transfer studies: pages agree with records, and records with rows."""

from __future__ import annotations

import math
import shlex
from typing import Any

import numpy as np
import pytest

from mupax.train.config.record import words_of
from mupax.train.studies.sweep.rows import Rows
from mupax.train.studies.transfer import command as transfer_command
from mupax.train.studies.transfer.drift import TOLERANCE, analyse
from mupax.train.studies.transfer.fit import STEP, Curve
from scripts.studies import transfer as transfer_studies

RECORDS = transfer_studies.records()
SEEDS = 3
"""At every rate, by default."""


def test_the_page_is_made_of_the_records() -> None:
    page = transfer_studies.ROOT / "docs" / "evidence" / "transfer.md"
    assert page.read_text() == transfer_studies.markdown(RECORDS), (
        "write it again: python -m scripts.studies.transfer --render"
    )


@pytest.mark.parametrize("name", transfer_studies.STUDIES)
def test_the_record_is_of_the_command(name: str) -> None:
    _, *words = words_of(RECORDS[name]["command"])
    assert words == transfer_studies.words(name)


def test_the_flag_replaces_the_minutes_of_a_study() -> None:
    words = transfer_studies.words("batch", 5.0)
    assert words[words.index("--minutes") + 1] == "5"


def test_the_commands_are_ones_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert transfer_studies.main(["--list"]) == 0
    for line in capsys.readouterr().out.splitlines():
        command = line.partition("mupax transfer ")[2]
        assert transfer_command.main([*shlex.split(command), "--dry-run"]) == 0


@pytest.mark.parametrize("name", transfer_studies.STUDIES)
def test_the_losses_are_those_of_the_rows(name: str) -> None:
    rows = Rows(transfer_studies.OUT / name)
    for study in RECORDS[name]["studies"]:
        for size in study["sizes"]:
            for point in size["points"]:
                row = rows[point["key"]]
                assert point["loss"] == (
                    None if row.diverged else pytest.approx(row.loss, abs=1e-6)
                )
                words = row.command.split()
                rate = float(words[words.index("--optimizer.peak-lr") + 1])
                assert rate == pytest.approx(2.0 ** point["log2_lr"])


@pytest.mark.parametrize("name", transfer_studies.STUDIES)
def test_the_drifts_follow_from_the_losses(name: str) -> None:
    for study in RECORDS[name]["studies"]:
        curves = [_curve(size["points"], size["rates_chosen_by_seeds"]) for size in study["sizes"]]
        analysis = analyse([size["size"] for size in study["sizes"]], curves)
        drift = study["drift_octaves_per_doubling"]
        for end in ("value", "low", "high"):
            assert drift[end] == pytest.approx(getattr(analysis.drift, end), abs=2e-4)
        assert study["verdict"] == analysis.verdict


@pytest.mark.parametrize("name", ["head_dim", "heads", "ed-heads", "depth", "moe-width"])
def test_what_a_study_must_show(name: str) -> None:
    """Check that the rate transfers, with a drift and price below the control's."""
    record = RECORDS[name]
    compared = {entry["preset"]: entry for entry in record["comparison"]}
    for study in record["studies"]:
        if study["preset"] not in compared:
            assert study["verdict"] == "drifts"  # the control
            continue
        entry = compared[study["preset"]]
        assert study["verdict"] == "transfers"
        assert study["conclusion"].startswith("Keep the learning rate: ")
        assert entry["apart"]
        assert entry["below_half"]


def test_the_batch_follows_the_square_root_and_the_horizon_no_source() -> None:
    """Check a rule of the batch, and the exponent of the horizon with its interval."""
    rule, constant = (study["drift_octaves_per_doubling"] for study in RECORDS["batch"]["studies"])
    assert abs(rule["value"]) < TOLERANCE
    assert constant["value"] > 0.3
    assert constant["low"] > TOLERANCE
    rule, constant = (study["drift_octaves_per_doubling"] for study in RECORDS["tokens"]["studies"])
    assert not [
        exponent
        for exponent in (-0.5, -0.32, 0.31)
        if constant["low"] <= exponent <= constant["high"]
    ]
    assert constant["low"] <= 0 <= constant["high"]
    assert rule["low"] > TOLERANCE  # of the wrong sign here


def _curve(points: list[dict[str, Any]], first: int) -> Curve:
    losses = {
        (p["log2_lr"], p["seed"]): math.inf if p["loss"] is None else p["loss"] for p in points
    }
    seeds = sorted({seed for _, seed in losses})
    rates = sorted(
        {rate for rate, _ in losses if all((rate, seed) in losses for seed in seeds[:SEEDS])}
    )
    table = [[losses.get((rate, seed), math.nan) for seed in seeds] for rate in rates]
    assert all((rate / STEP).is_integer() for rate in rates)
    return Curve(np.array(rates), np.array(table), first)
