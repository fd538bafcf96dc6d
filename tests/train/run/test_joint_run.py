"""A run under a joint rule trains to the bit as one with the numbers written as flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import small_runs
from tests.fixtures.commands import Done
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import completed, folder, record_of, refused

__all__ = ["folder", "one_device", "shared_programs"]  # fixtures

BASE = (
    "--preset.base lm-proxy,batch=4,tokens=1280 --optimizer.peak-lr 0.02 "
    "--optimizer.warmup-steps 12"
)
BY_HAND = (
    "--preset.base lm-proxy --optimizer.peak-lr 0.04 --optimizer.warmup-steps 3 --optimizer.eps 5e-9 "
    "--optimizer.weight-decay 6e-4 --optimizer.b1 0.6000000000000001 --optimizer.b2 0.7999999999999998"
)
"""Four times the batch at the same tokens: 5 steps where the base has 20."""


COUPLED = "--steps 5 --log.no-tensorboard --optimizer.decay coupled"


def train(*words: str) -> Done:
    return completed(COUPLED, *words)


def rows(workdir: str) -> list[dict[str, Any]]:
    """Return what steps have but their clock and the tokens, which a batch of another size changes."""
    names = ("loss", "lr", "grad_norm")
    return [
        {name: row[name] for name in names} for row in small_runs.rows(workdir) if "loss" in row
    ]


@pytest.fixture(scope="module")
def scaled(folder: Path) -> Done:
    return train(BASE, "--joint sde --workdir sde")


def test_the_rules_numbers_are_those_that_train(scaled: Done):
    train(BY_HAND, "--workdir hand")
    train(BASE, "--workdir none")
    assert rows("sde") == rows("hand")
    assert [row["lr"] for row in rows("sde")][:3] == pytest.approx([0.04 / 3, 0.08 / 3, 0.04])
    control = rows("none")
    assert control[0]["loss"] == rows("sde")[0]["loss"]
    assert all(a["loss"] != b["loss"] for a, b in zip(control[1:], rows("sde")[1:], strict=True))


def test_the_header_and_the_record_say_so(scaled: Done):
    message = (
        "joint sde at 4 times the base's batch, 1 times its tokens: peak_lr 0.04, b1 0.6, b2 0.8, eps 5e-09, "
        "weight_decay 0.0006, warmup_steps 3"
    )
    assert message in scaled.text
    advice = "the noise scale, which is not known here: measure it with `mupax noise WORKDIR`"
    assert advice in scaled.text
    config = record_of("sde")["config"]
    assert config["preset"]["base"] == "lm-proxy,batch=4,tokens=1280"
    assert config["preset"]["joint"] == "sde"
    assert config["optimizer"]["peak_lr"] == 0.02


def test_a_run_does_not_go_on_under_another_rule(scaled: Done):
    answer = refused(COUPLED, BASE, "--workdir sde --resume --steps 6")
    message = "the run in sde has preset.joint sde, not none; continue it with --preset.joint sde"
    assert message in answer


def test_the_dry_run_shows_the_numbers_and_the_decay_as_a_timescale(folder: Path):
    done = train(BASE, "--joint sde --dry-run")
    assert "joint sde at 4 times the base's batch" in done.text
    (warmup,) = re.findall(r"warm-up +3 steps, ([\d,]+) tokens", done.out)
    ((steps, tokens),) = re.findall(r"steps +(\d+), ([\d,]+) tokens", done.out)[:1]
    assert int(warmup.replace(",", "")) * int(steps) == int(tokens.replace(",", "")) * 3
    timescale = (
        r"decay averages +8\.33e\+03 of the run, 41,667 steps \(tau = batch / \(lr wd tokens\)"
    )
    assert re.search(timescale, done.out)
    assert "joint" not in train("--dry-run").out
