"""`--optimizer.warmup-tokens` and `--optimizer.decay-timescale`: numbers of the run's length, as steps and weight decay."""

from __future__ import annotations

import re

import pytest

from mupax.__main__ import main
from mupax.presets.joint import timescale
from mupax.train.config.record import to_json
from mupax.train.config.run import Config
from mupax.train.run.resume import changes
from tests.fixtures.command_line import printed, refused

pytestmark = pytest.mark.core

Capture = pytest.CaptureFixture[str]
BASE = (
    "lm-tiny",
    "--preset.base",
    "lm-proxy,batch=8,tokens=819200",
    "--joint",
    "sde",
    "--optimizer.b1",
    "0.95",
)
FLAGS = ("--optimizer.warmup-tokens", "102.4k", "--optimizer.decay-timescale", "0.25")


def tau(config: Config) -> float:
    """Of the run as it trains."""
    opt = config.scaled_optimizer
    return timescale(opt.peak_lr, opt.weight_decay, config.steps, opt.decay)


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_they_become_steps_and_weight_decay(decay: str, capsys: Capture):
    config = printed(capsys, "lm-tiny", *FLAGS, "--optimizer.decay", decay)
    assert config.optimizer.warmup_steps == 50  # of 16 x 128 tokens
    expected = {
        "independent": 1 / (0.25 * 800),
        "coupled": 1 / (0.25 * 800 * config.optimizer.peak_lr),
    }
    assert config.optimizer.weight_decay == pytest.approx(expected[decay])
    assert tau(config) == pytest.approx(0.25)
    # What a run goes on with: numbers as if they had been written.
    opt = config.optimizer
    plain = ("--optimizer.warmup-steps", "50", "--optimizer.weight-decay", repr(opt.weight_decay))
    assert printed(capsys, "lm-tiny", *plain, "--optimizer.decay", decay) == config
    assert (
        printed(capsys, "lm-tiny", *FLAGS, "--optimizer.decay", decay, "--resume").optimizer == opt
    )


def test_a_run_that_goes_on_for_longer_says_that_its_decay_changes(capsys: Capture):
    short = printed(capsys, "lm-tiny", *FLAGS)
    longer = printed(capsys, "lm-tiny", *FLAGS, "--steps", "1600", "--resume")
    assert tau(longer) == pytest.approx(0.25) == tau(short)
    decay, steps = sorted(changes(to_json(short), longer))
    assert re.fullmatch(r"optimizer\.weight_decay (\S+) -> (\S+)", decay)
    assert steps == "steps 800 -> 1600"
    # Control: what is not given again is the number that the run had.
    plain = printed(
        capsys,
        "lm-tiny",
        "--optimizer.warmup-steps",
        "50",
        "--optimizer.weight-decay",
        repr(short.optimizer.weight_decay),
        "--steps",
        "1600",
    )
    assert changes(to_json(short), plain) == [steps]


def test_warm_up_of_images_is_in_images(capsys: Capture):
    config = printed(
        capsys, "vit-digits", "--optimizer.warmup-tokens", "1280", "--data.batch-size", "64"
    )
    assert config.optimizer.warmup_steps == 20
    assert (
        printed(capsys, "vit-digits", "--optimizer.warmup-tokens", "1").optimizer.warmup_steps == 1
    )


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_under_sde_tokens_of_warm_up_and_timescale_stay_as_the_batch_grows(
    decay: str, capsys: Capture
):
    durations = ("--optimizer.warmup-tokens", "81.92k", *FLAGS[2:])
    for batch in (8, 64):
        flags = (
            "--optimizer.decay",
            decay,
            "--data.batch-size",
            str(batch),
            "--steps",
            str(6400 // batch),
        )
        config = printed(capsys, *BASE, *durations, *flags)
        assert config.scaled_optimizer.warmup_steps * batch * 128 == 81920
        assert tau(config) == pytest.approx(0.25)
    # Control: the same numbers without the rule are another warm-up and another timescale.
    opt = config.optimizer
    assert opt.warmup_steps * 64 * 128 == 8 * 81920
    assert timescale(opt.peak_lr, opt.weight_decay, config.steps, opt.decay) == pytest.approx(
        8 * 0.25
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            (*FLAGS, "--optimizer.warmup-steps", "3"),
            "warmup-tokens and --optimizer.warmup-steps are one number",
        ),
        (
            (*FLAGS, "--optimizer.weight_decay=0.1"),
            "decay-timescale and --optimizer.weight-decay are one number",
        ),
        (
            ("--optimizer.warmup-tokens", "2m"),
            "--optimizer.warmup-tokens 2m is more than the 1,638,400 of the run",
        ),
        (
            ("--optimizer.warmup-tokens", "many"),
            "--optimizer.warmup-tokens is many; write a number such as",
        ),
        (
            ("--optimizer.decay-timescale", "0"),
            "decay-timescale is 0; write a share of the run above 0",
        ),
        (("--optimizer.decay-timescale=-1",), "decay-timescale is -1"),
        (("--optimizer.decay-timescale", "nan"), "decay-timescale is nan"),
        (("--optimizer.decay-timescale", "1", "--optimizer.name", "adam"), "is not read by adam"),
        (
            ("--optimizer.decay-timescale", "1", "--optimizer.peak-lr", "0"),
            "optimizer.peak_lr is 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], text: str, capsys: Capture):
    assert text in " ".join(refused(capsys, "train", "lm-tiny", *words).split())


def test_the_bases_run_bounds_warm_up_under_a_joint_rule(capsys: Capture):
    text = refused(capsys, "train", *BASE, "--optimizer.warmup-tokens", "1m")
    assert "more than the 819,200 of the base's run" in " ".join(text.split())


def test_a_plan_whose_steps_come_from_its_tokens_takes_neither(capsys: Capture):
    assert main(["plan", "lm-tiny", "--tokens", "10m", *FLAGS[2:]]) == 2
    assert "write --steps N in place of --tokens" in " ".join(capsys.readouterr().err.split())
