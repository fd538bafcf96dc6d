"""`--joint`: where the base's batch and tokens come from, what the run then trains with, and what is refused before JAX."""

from __future__ import annotations

import dataclasses

import pytest

from mupax.presets.tuned import find
from mupax.train.config import sizes
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, to_json, words
from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig
from mupax.train.studies.sweep.sweep import key_of, shape_of
from mupax.zoo.configs import ConfigError, DecoderConfig
from tests.fixtures.command_line import printed, refused
from tests.fixtures.commands import output

pytestmark = pytest.mark.core

Capture = pytest.CaptureFixture[str]
FOUR = "--data.batch-size 64 --steps 200"
"""lm-tiny at four times its batch of 16 and its own tokens, 800 steps of 16 x 128."""


def shown(capsys: Capture, *words: str) -> Config:
    """Return the config that the recipe lm-tiny with further words prints."""
    return printed(capsys, "lm-tiny", *" ".join(words).split())


def test_a_run_without_a_joint_rule_is_as_it_was(capsys: Capture):
    for rule in ("", "--joint none"):
        config = shown(capsys, FOUR, rule)
        assert config.scaled_optimizer is config.optimizer
        assert config.preset == RECIPES["lm-tiny"]().preset
    before = to_json(config)
    for field in ("joint", "noise_scale"):
        del before["preset"][field]
    assert from_json(before) == config  # the record of an older run


def test_the_recipes_batch_and_tokens_are_the_base(capsys: Capture):
    config = shown(capsys, FOUR, "--joint sde")
    opt = config.optimizer
    assert config.preset.base == "lm-proxy,batch=16,tokens=1638400"
    assert opt == RECIPES["lm-tiny"]().optimizer
    # Independent decay is lr*wd: four times.
    expected = {
        "peak_lr": 0.016,
        "b1": 0.6,
        "b2": 0.8,
        "eps": 5e-9,
        "weight_decay": 0.0012,
        "warmup_steps": 12,
    }
    scaled = dataclasses.asdict(config.scaled_optimizer)
    assert scaled == pytest.approx({**dataclasses.asdict(opt), **expected})
    at_the_base = shown(capsys, "--joint sde")
    assert at_the_base.scaled_optimizer == at_the_base.optimizer
    assert from_json(to_json(config)) == config
    flags = words(config)
    assert flags is not None
    assert printed(capsys, "lm-tiny", *flags) == config


def test_a_recipe_without_its_constants_has_a_command(capsys: Capture):
    config = printed(capsys, "lm-laptop", "--preset.constants", "--steps", "600")
    assert config.preset.constants == ()
    flags = words(config)
    assert flags is not None
    assert printed(capsys, "lm-laptop", *flags) == config


SIZES = "embed=64,heads=2,kv_heads=2,head_dim=32,mlp=160,layers=2"
"""Sizes of `lm-proxy`, as a base is written."""


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("lm-proxy,batch=8,tokens=819200", "lm-proxy,batch=8,tokens=819200"),
        ("lm-proxy,batch=8", "lm-proxy,batch=8,tokens=1638400"),
        (f"{SIZES},batch=8,tokens=819200", f"{SIZES},batch=8,tokens=819200"),
        ("None", "None,batch=16,tokens=1638400"),
        # Recipes bring their own: gpt2-c4 has 1024 positions, which are eight examples here.
        (
            "gpt2-c4",
            "embed=768,heads=12,kv_heads=12,head_dim=64,mlp=3072,layers=12,batch={},tokens={}",
        ),
        ("lm-tiny", "lm-tiny,batch=16,tokens=1638400"),
    ],
)
def test_what_a_base_says_of_batch_and_tokens_holds(base: str, expected: str, capsys: Capture):
    other = RECIPES["gpt2-c4"]()
    batch = other.data.batch_size
    expected = expected.format(batch * 8, batch * other.model.units * other.steps)
    flags = "--joint sde --data.batch-size 32 --optimizer.b2 0.9999 --optimizer.b1 0.999"
    assert shown(capsys, flags, f"--preset.base {base}").preset.base == expected


def test_a_tuned_preset_brings_the_batch_and_tokens_of_its_study(capsys: Capture):
    studies = [find.load(path) for path in find.files().values()]
    study = next(
        study for study in studies if study.preset == "mup" and study.optimizer["name"] == "adam"
    )
    tokens = study.provenance["seen"]
    batch = study.provenance["batch"]
    unit = tokens // (study.provenance["steps"] * batch)
    flags = f"--preset {study.use} --joint complete-d --model.seq-len {unit}"
    base = shown(capsys, flags).preset.base
    assert base is not None
    assert f"batch={batch},tokens={tokens}" in base


def test_batches_count_tokens_where_examples_change_their_length(capsys: Capture):
    config = shown(capsys, "--joint sde --model.seq-len 64")
    assert config.preset.base == "lm-proxy,batch=32,tokens=1638400"
    half_step_lr = 0.008 * 0.5**0.5  # half the tokens in a step
    assert config.scaled_optimizer.peak_lr == pytest.approx(half_step_lr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--joint sde --data.batch-size 256 --steps 50",
            "b1 would be 1 - 16 x 0.1 = -0.6, not in (0, 1)",
        ),
        ("--joint complete-d --steps 50", "b1 would be 1 - 16 x 0.1 = -0.6"),
        (
            "--joint sde --optimizer.name muon",
            "the joint rule sde is for adam and says nothing about muon",
        ),
        (
            "--joint complete-d --optimizer.name sgd",
            "the joint rule complete-d is for adam and says nothing about sgd",
        ),
        ("--joint sde --data.batch-size 64 --noise-scale 40", "a batch of 64 is above it"),
        ("--joint sde --data.batch-size 8 --noise-scale 12", "a batch of 16 is above it"),
        (
            "--joint sde --noise-scale -3",
            "preset.noise_scale is -3.0; write a number of examples above 0",
        ),
        (
            "--joint sd",
            "--joint/--preset.joint needs one of 'complete-d', 'completed-muon', 'none', 'sde', "
            "not 'sd'",
        ),
        (
            "--joint sde --preset.base lm-proxy,batch=0",
            "needs the batch and the tokens that the rate was tuned at",
        ),
        ("--joint sde --preset.base lm-proxy,batsh=8", "base batsh=8: write a logical axis"),
        ("--preset.base=", "preset.base : '' is no AXIS=N"),
        ("--preset.base lm-proxy,batch", "'batch' is no AXIS=N"),
        ("--joint sde --preset.base vit-digits", "no model is named 'vit-digits'"),
        (
            "--joint sde --model.seq-len 100",
            "is no whole number of examples of this model's length",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: str, message: str, capsys: Capture):
    assert message in refused(capsys, "train", "lm-tiny", *words.split())


def test_control_a_batch_below_the_noise_scale_is_not_refused(capsys: Capture):
    assert shown(capsys, FOUR, "--joint sde --noise-scale 64").preset.noise_scale == 64
    shown(capsys, "--joint sde --noise-scale 3")  # at the base nothing is scaled
    shown(capsys, FOUR, "--noise-scale 3")


def test_a_config_of_ones_own_says_what_its_base_lacks():
    config = dataclasses.replace(
        RECIPES["lm-tiny"](), preset=PresetConfig(base="lm-proxy", joint="sde")
    )
    with pytest.raises(
        ConfigError,
        match=r"write --preset\.base lm-proxy,batch=16,tokens=1638400 with those numbers",
    ):
        _ = config.scaled_optimizer


def sde(**changes: object) -> Config:
    preset = PresetConfig(base="lm-proxy,batch=8,tokens=1638400", joint="sde")
    return dataclasses.replace(RECIPES["lm-tiny"](), preset=preset, **changes)


def test_points_with_other_betas_are_no_points_of_one_program():
    none = dataclasses.replace(sde(), preset=dataclasses.replace(sde().preset, joint="none"))
    assert shape_of(sde()) != shape_of(none)
    assert shape_of(sde()).optimizer.b1 == pytest.approx(0.8)
    assert key_of(sde(), "") != key_of(none, "")
    noisy = dataclasses.replace(none, preset=dataclasses.replace(none.preset, noise_scale=9.0))
    assert key_of(noisy, "") == key_of(none, "")


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (
            f"sweep lm-tiny --lr 0.01 --vary preset.joint=none,sde,complete-d {FOUR}",
            [
                "joint sde: peak learning rates are the base's; runs use 2 times them",
                "joint complete-d: peak learning rates are the base's; runs use 2 times them",
            ],
        ),
        (
            f"tune lm-tiny --over lr --joint sde {FOUR}",
            ["joint sde: peak learning rates are the base's; runs use 2 times them"],
        ),
        (
            "transfer lm-tiny --grow batch=8,16,32 --joint sde --control none",
            ["joint sde: peak learning rates are the base's; runs use 1 to 2 times them"],
        ),
        ("sweep lm-tiny --lr 0.01 --joint sde", []),
        (f"sweep lm-tiny --lr 0.01 {FOUR}", []),
    ],
)
def test_studies_say_that_rates_under_a_joint_rule_are_the_bases(words: str, notes: list[str]):
    lines = output(words, "--dry-run").splitlines()
    assert [line for line in lines if "rates are the base's" in line] == notes


def test_rows_of_older_sweeps_keep_their_names():
    """The name is of the version before presets had joint rules: without it every committed study would train anew."""
    model = DecoderConfig(width=8, depth=1, num_heads=2, vocab_size=16, seq_len=4)
    config = Config(
        recipe="lm-tiny", model=model, data=DataConfig(name="python_corpus", batch_size=2), steps=3
    )
    assert key_of(config, "digest") == "245dbff204e03466"


@pytest.mark.parametrize(
    ("axis", "size", "steps", "warmup"), [("batch", 64, 200, 12), ("tokens", 6553600, 3200, 200)]
)
def test_grown_runs_keep_tokens_or_batch_and_the_fraction_of_warm_up(
    axis: str, size: int, steps: int, warmup: int
):
    run = sizes.grown_run(RECIPES["lm-tiny"](), axis, size)
    assert (run.steps, run.optimizer.warmup_steps) == (steps, warmup)
    assert run.data.batch_size == (size if axis == "batch" else 16)
    with pytest.raises(ConfigError, match="no whole number of steps"):
        sizes.grown_run(run, axis, 7)


def test_a_joint_rule_scales_a_final_decay_that_no_longer_fits():
    wsd = OptimizerConfig(schedule="wsd", warmup_steps=100, decay_steps=600)
    config = sde(optimizer=wsd, steps=200, data=dataclasses.replace(sde().data, batch_size=64))
    assert (config.scaled_optimizer.warmup_steps, config.scaled_optimizer.decay_steps) == (12, 75)
