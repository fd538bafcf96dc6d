"""`--optimizer.warmup-tokens` and `--optimizer.decay-timescale`: numbers of the run's length, as steps and weight decay."""

from __future__ import annotations

import re

import pytest

from mupax.presets.joint import timescale
from mupax.train.config import joint
from mupax.train.config.record import to_json
from mupax.train.config.run import Config
from mupax.train.run.resume import changes
from tests.fixtures.command_line import printed, refused
from tests.fixtures.commands import command

pytestmark = pytest.mark.core

Capture = pytest.CaptureFixture[str]
BASE = "lm-tiny --preset.base lm-proxy,batch=8,tokens=819200 --joint sde --optimizer.b1 0.95"
TIMESCALE = "--optimizer.decay-timescale 0.25"
FLAGS = f"--optimizer.warmup-tokens 102.4k {TIMESCALE}"


def shown(capsys: Capture, *words: str) -> Config:
    """Return the config that a command line prints."""
    return printed(capsys, *" ".join(words).split())


def tau(config: Config) -> float:
    """Return the timescale of weight decay in the run as it trains."""
    opt = config.scaled_optimizer
    return timescale(opt.peak_lr, opt.weight_decay, config.steps, opt.decay)


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_they_become_steps_and_weight_decay(decay: str, capsys: Capture):
    words = f"lm-tiny --optimizer.decay {decay}"
    config = shown(capsys, words, FLAGS)
    opt = config.optimizer
    assert opt.warmup_steps == 50  # of 16 x 128 tokens
    decay_steps = 0.25 * 800
    expected = {"independent": 1 / decay_steps, "coupled": 1 / (decay_steps * opt.peak_lr)}
    assert opt.weight_decay == pytest.approx(expected[decay])
    assert tau(config) == pytest.approx(0.25)
    # What a run goes on with: numbers as if they had been written.
    plain = f"--optimizer.warmup-steps 50 --optimizer.weight-decay {opt.weight_decay!r}"
    assert shown(capsys, words, plain) == config
    assert shown(capsys, words, FLAGS, "--resume").optimizer == opt


def test_a_run_that_goes_on_for_longer_says_that_its_decay_changes(capsys: Capture):
    short = shown(capsys, "lm-tiny", FLAGS)
    longer = shown(capsys, "lm-tiny --steps 1600 --resume", FLAGS)
    assert tau(longer) == pytest.approx(0.25) == tau(short)
    decay, steps = sorted(changes(to_json(short), longer))
    assert re.fullmatch(r"optimizer\.weight_decay (\S+) -> (\S+)", decay)
    assert steps == "steps 800 -> 1600"
    # Control: what is not given again is the number that the run had.
    weight_decay = f"--optimizer.weight-decay {short.optimizer.weight_decay!r}"
    plain = shown(capsys, "lm-tiny --optimizer.warmup-steps 50 --steps 1600", weight_decay)
    assert changes(to_json(short), plain) == [steps]


def test_warm_up_of_images_is_in_images(capsys: Capture):
    words = "vit-digits --optimizer.warmup-tokens"
    assert shown(capsys, words, "1280 --data.batch-size 64").optimizer.warmup_steps == 20
    assert shown(capsys, words, "1").optimizer.warmup_steps == 1


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_under_sde_tokens_of_warm_up_and_timescale_stay_as_the_batch_grows(
    decay: str, capsys: Capture
):
    words = f"{BASE} --optimizer.warmup-tokens 81.92k {TIMESCALE} --optimizer.decay {decay}"
    for batch in (8, 64):
        config = shown(capsys, words, f"--data.batch-size {batch} --steps {6400 // batch}")
        assert config.scaled_optimizer.warmup_steps * batch * 128 == 81920
        assert tau(config) == pytest.approx(0.25)
    # Control: the same numbers without the rule are another warm-up and another timescale.
    opt = config.optimizer
    assert opt.warmup_steps * 64 * 128 == 8 * 81920
    unscaled = timescale(opt.peak_lr, opt.weight_decay, config.steps, opt.decay)
    assert unscaled == pytest.approx(8 * 0.25)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            f"{FLAGS} --optimizer.warmup-steps 3",
            "warmup-tokens and --optimizer.warmup-steps are one number",
        ),
        (
            f"{FLAGS} --optimizer.weight-decay=0.1",
            "decay-timescale and --optimizer.weight-decay are one number",
        ),
        (
            "--optimizer.warmup-tokens 2m",
            "--optimizer.warmup-tokens 2m is more than the 1,638,400 of the run",
        ),
        (
            "--optimizer.warmup-tokens many",
            "--optimizer.warmup-tokens is many; write a number such as",
        ),
        (
            "--optimizer.decay-timescale 0",
            "decay-timescale is 0; write a share of the run above 0",
        ),
        ("--optimizer.decay-timescale=-1", "decay-timescale is -1"),
        ("--optimizer.decay-timescale nan", "decay-timescale is nan"),
        ("--optimizer.decay-timescale 1 --optimizer.name adam", "is not read by adam"),
        ("--optimizer.decay-timescale 1 --optimizer.peak-lr 0", "optimizer.peak_lr is 0"),
    ],
)
def test_what_cannot_be_is_refused(words: str, text: str, capsys: Capture):
    assert text in " ".join(refused(capsys, "train", "lm-tiny", *words.split()).split())


def test_the_bases_run_bounds_warm_up_under_a_joint_rule():
    done = command("train", BASE, "--optimizer.warmup-tokens 1m")
    assert done.code == 2
    assert "more than the 819,200 of the base's run" in done.message


def test_a_plan_whose_steps_come_from_its_tokens_takes_neither():
    done = command("plan lm-tiny --tokens 10m", TIMESCALE)
    assert done.code == 2
    assert "write --steps N in place of --tokens" in done.message


def test_coupled_decay_has_a_timescale_for_each_learning_rate_of_muon(capsys: Capture):
    words = "lm-laptop --optimizer.peak-lr 0.05 --optimizer.adam-lr 0.002 --steps 1000"
    config = shown(capsys, words, "--optimizer.decay coupled --optimizer.weight-decay 0.1")
    text = joint.decay_text(config.scaled_optimizer, config.steps)
    parts = "0.2 of the run, 200 steps, of the Adam part 5, 5,000 steps"
    assert text == f"{parts} (tau = batch / (lr wd tokens) at the peak)"
    config = shown(capsys, words, "--optimizer.decay independent --optimizer.weight-decay 0.1")
    text = joint.decay_text(config.scaled_optimizer, config.steps)
    assert text == "0.01 of the run, 10 steps (tau = batch / (wd tokens) at the peak)"
