"""Words of --over: which number each means, in which range, and what is refused before any work."""

from __future__ import annotations

import dataclasses

import pytest

from mupax.presets.roles import PresetError
from mupax.train.config.preset import preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, PresetConfig
from mupax.train.studies.tune import over
from mupax.zoo.configs import ConfigError

pytestmark = pytest.mark.core
LM = RECIPES["lm-tiny"]()


def the(word: str, config: Config = LM) -> over.Constant:
    (constant,) = over.parse([word], config)
    return constant


@pytest.mark.parametrize(
    ("word", "flag", "low", "high"),
    [
        ("lr", "optimizer.peak_lr", 0.001, 0.064),
        ("weight_decay=2^-10:2^-4", "optimizer.weight_decay", 2**-10, 2**-4),
        ("weight-decay", "optimizer.weight_decay", 3e-4 / 16, 3e-4 * 16),
        ("readout.lr", "preset.rates.readout", 2**-4, 2**4),
        ("embedding.lr=0.5:2", "preset.rates.token_embedding", 0.5, 2),
        ("query.std", "preset.stds.block.query", 2**-3, 2**3),
        ("preset.multipliers.block.mlp_out", "preset.multipliers.block.mlp_out", 2**-3, 2**3),
        ("norm_gain.lr", "preset.rates.norm_gain", 2**-4, 2**4),
        ("attention.multiplier", "preset.c_a", 2**-3, 2**3),
        ("branch.multiplier", "preset.beta0", 2**-3, 2**3),
        ("b1=0.8:0.99", "optimizer.b1", 0.8, 0.99),
        ("warmup_steps=10:200", "optimizer.warmup_steps", 10, 200),
    ],
)
def test_a_word_means_one_flag_and_has_a_range(
    word: str, flag: str, low: float, high: float
) -> None:
    constant = the(word)
    assert (constant.flag, constant.low, constant.high) == (
        flag,
        pytest.approx(low),
        pytest.approx(high),
    )
    ends = sorted(map(constant.value, constant.steps))
    assert low * (1 - 1e-5) <= ends[0] < low * 1.06
    assert high / 1.06 < ends[1] <= high * (1 + 1e-5)


def test_images_are_read_by_patches() -> None:
    assert the("embedding.lr", RECIPES["vit-digits"]()).flag == "preset.rates.patch_embedding"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("redout.lr", "redout.lr: no number of this run has that name; did you mean 'readout.lr'"),
        ("readout.decays", "did you mean 'readout.decay'"),
        ("norm_gain.decay", "no number of this run has that name"),
        ("patch_embedding.lr", "no number of this run has that name"),
        ("steps=10:20", "no number of this run has that name"),
        ("alpha_a", "no number of this run has that name"),
        ("momentum=0.5:0.9", "no number of this run has that name"),
        ("lr,optimizer.peak_lr=0.1:1", "lr and optimizer.peak_lr are both --optimizer.peak_lr"),
        ("query.lr,block.query.lr", "are both --preset.rates.block.query"),
        ("lr=1", "write LOW:HIGH, as 2^-3:2^3"),
        ("lr=1:2:3", "write LOW:HIGH, as 2^-3:2^3"),
        ("lr=a:2", "'a' is not a number"),
        ("lr=2:1", "LOW below HIGH, both above 0"),
        ("lr=0:1", "LOW below HIGH, both above 0"),
        ("b1=0.9:1", "both above 0 and below 1"),
        ("lr=0.008:0.0081", "the range has one number"),
        ("b1", "it has no range of its own; write one, as b1=0.9:0.999"),
        ("readout.lr=1e-40:1", "write a number from 1e-30 to 1e30"),
        ("", "--over names nothing"),
    ],
)
def test_what_means_nothing_is_refused_with_the_nearest(words: str, message: str) -> None:
    with pytest.raises((ConfigError, PresetError)) as error:
        over.parse([word for word in words.split(",") if word], LM)
    assert message in str(error.value)


def test_a_constant_that_the_preset_lacks_names_those_that_have_it() -> None:
    sp = dataclasses.replace(LM, preset=PresetConfig(name="sp", base="lm-proxy"))
    with pytest.raises(
        ConfigError, match="sp has no constant c_a; mup, mup-half, depth-mup, completep have it"
    ):
        over.parse(["attention.multiplier"], sp)
    with pytest.raises(ConfigError, match="sp has no constant gamma0"):
        over.parse(["gamma0=1:2"], sp)


def test_a_point_is_the_run_with_these_numbers_and_the_start_is_the_run_itself() -> None:
    constants = over.parse(
        ["lr", "readout.lr", "branch.multiplier", "b1=0.8:0.99", "warmup_steps=10:200"], LM
    )
    assert over.with_point(LM, constants, (0, 0, 0, 0, 0)) is LM
    config = over.with_point(LM, constants, (16, -32, 8, 16, 3))
    assert config.optimizer.peak_lr == 0.016
    assert config.optimizer.b1 == 0.8
    assert config.optimizer.warmup_steps == 57
    assert config.preset.beta0 == pytest.approx(2**0.5, rel=1e-5)
    assert preset_of(config).constants == {"rates.readout": 0.25}


def test_a_constant_that_the_run_has_already_is_where_the_search_starts() -> None:
    preset = PresetConfig(
        name="mup", base="lm-proxy", constants=("rates.readout=4", "stds.readout=2"), beta0=0.5
    )
    config = dataclasses.replace(LM, preset=preset)
    constants = over.parse(["readout.lr", "branch.multiplier"], config)
    assert [constant.start for constant in constants] == [4, 0.5]
    assert over.with_point(config, constants, (16, 0)).preset.constants == (
        "rates.readout=8",
        "stds.readout=2",
    )


def test_a_number_that_is_off_is_searched_in_its_range_and_stays_off_at_the_start() -> None:
    config = dataclasses.replace(LM, optimizer=dataclasses.replace(LM.optimizer, weight_decay=0.0))
    with pytest.raises(
        ConfigError, match=r"it is 0 in this run; write one, as weight_decay=0\.01:1"
    ):
        over.parse(["weight_decay"], config)
    constant = the("weight_decay=0.01:1", config)
    low, high = constant.steps
    assert low > 0
    assert constant.value(0) == 0
    assert constant.value(low) == pytest.approx(0.01)
    assert constant.value(high) == pytest.approx(1, rel=0.05)


def test_muons_second_rate_starts_at_the_first_and_then_stays() -> None:
    muon = dataclasses.replace(LM, optimizer=dataclasses.replace(LM.optimizer, name="muon"))
    constants = over.parse(["lr", "adam-lr"], muon)
    peak_lr = muon.optimizer.peak_lr
    assert [constant.start for constant in constants] == [peak_lr, peak_lr]
    assert over.with_point(muon, constants, (0, 0)) == muon

    octave = over.STEPS_PER_OCTAVE
    faster = over.with_point(muon, constants, (octave, 0)).optimizer
    assert faster.peak_lr == pytest.approx(2 * peak_lr)
    assert faster.adam_lr == peak_lr
    raised = over.with_point(muon, constants, (0, octave)).optimizer
    assert raised.peak_lr == peak_lr
    assert raised.adam_lr == pytest.approx(2 * peak_lr)


@pytest.mark.parametrize("word", ["orthogonalizer", "decay"])
def test_a_choice_among_names_has_no_octaves(word: str) -> None:
    muon = dataclasses.replace(LM, optimizer=dataclasses.replace(LM.optimizer, name="muon"))
    with pytest.raises(ConfigError, match="no number of this run has that name"):
        over.parse([word], muon)
