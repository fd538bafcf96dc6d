"""Tuned presets: what --preset PRESET:NAME makes of a run, and how a study becomes one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.presets import PresetError
from mupax.presets.tuned import find as tuned
from mupax.train.config import cli
from mupax.train.config.preset import PresetConfig, preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import words_of
from mupax.train.config.run import Config
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer import study as transfer
from mupax.train.studies.transfer import tuned as transfer_tuned
from mupax.train.studies.transfer.drift import analyse
from mupax.zoo.configs import ConfigError
from tests.presets.tuned.test_find import BASE, mine

pytestmark = pytest.mark.core
__all__ = ["mine"]

EVIDENCE = Path(__file__).parents[4] / "docs" / "evidence" / "tuned"
SEARCHED = "mup:lm-laptop-v2"
"""What a search has tuned, at one size: the rates and constants of the recipe of that name."""
DECIDED = (
    "mup:lm-short-v1",
    "mup-half:lm-short-v1",
    "mup:lm-heads-v1",
    "depth-mup:lm-short-one-v1",
    "depth-mup:vit-digits-sgd-one-v1",
)
"""Tuned presets that were saved from rows of docs/evidence/transfer."""


def committed() -> dict[str, tuned.Tuned]:
    """Return every tuned preset that the project ships or keeps as evidence."""
    paths = (*tuned.FOLDER.glob("*.json"), *EVIDENCE.glob("*.json"))
    return {preset.use: preset for preset in map(tuned.load, paths)}


# Runs


def parsed(*words: str) -> Config:
    return cli.parse("lm-tiny", RECIPES["lm-tiny"], words).config


@pytest.mark.parametrize(
    "flag", [("--preset", "depth-mup:mine-v1"), ("--preset.name=depth-mup:mine-v1",)]
)
def test_a_run_takes_every_number(mine: tuned.Tuned, flag: tuple[str, ...]):
    config = parsed(*flag, "--steps", "300")
    opt, preset = config.optimizer, config.preset
    assert (opt.name, opt.peak_lr, opt.b1, opt.b2, opt.eps) == ("adam", 0.0078, 0.8, 0.99, 1e-12)
    assert (opt.schedule, opt.warmup_steps, opt.final_lr_fraction, opt.clip_norm) == (
        "linear",
        30,
        0.05,
        None,
    )
    assert (preset.name, preset.alpha_l, preset.constants) == ("depth-mup", 1.0, ("c_a=0.5",))
    assert preset_of(config).base == BASE
    # The record needs no file.
    (tuned.OWN_FOLDER / "depth-mup.mine-v1.json").unlink()
    assert preset_of(dataclasses.replace(config, preset=preset)).choices["c_a"] == 0.5


def test_flags_override(mine: tuned.Tuned):
    config = parsed(
        "--preset", "depth-mup:mine-v1", "--optimizer.peak-lr", "0.5", "--preset.alpha-l", "0.75", "--optimizer.warmup-steps", "7",
        "--preset.base", "lm-proxy", "--optimizer.name", "adamw",
    )  # fmt: skip
    assert (config.optimizer.peak_lr, config.optimizer.warmup_steps) == (0.5, 7)
    assert (config.preset.alpha_l, config.preset.base) == (0.75, "lm-proxy")
    assert parsed("--preset", "depth-mup:mine-v1", "--preset", "sp").optimizer == parsed().optimizer


def test_another_optimizer_is_refused(mine: tuned.Tuned):
    with pytest.raises(ConfigError, match="is tuned for adam, and its rate means nothing to sgd"):
        parsed("--preset", "depth-mup:mine-v1", "--optimizer.name", "sgd")


def test_a_far_size_warns_and_a_near_one_does_not(
    mine: tuned.Tuned, capsys: pytest.CaptureFixture[str]
):
    parsed(
        "--preset",
        "depth-mup:mine-v1",
        "--model.width",
        "2048",
        "--model.num-heads",
        "32",
        "--model.depth",
        "32",
    )
    assert capsys.readouterr().err == ""  # exactly three doublings of each
    parsed(
        "--preset",
        "depth-mup:mine-v1",
        "--model.depth",
        "64",
        "--model.num-heads",
        "1",
        "--model.width",
        "32",
    )
    err = capsys.readouterr().err
    assert "heads" not in err  # two doublings below
    assert "layers +4.0" in err
    assert "3 doublings" in err
    assert mine.distance({"head_dim": 128, "heads": 1, "layers": 4}) == {
        "head_dim": 1.0,
        "heads": -2.0,
    }


def test_the_command_line_says_it(mine: tuned.Tuned, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "lm-tiny", "--preset", "depth-mup:mine-v1", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"]["peak_lr"] == 0.0078
    assert main(["train", "lm-tiny", "--preset", "depth-mup:yours"]) == 2


# From a study


def judged(preset: PresetConfig, label: str) -> tuple[transfer.Measured, Any]:
    study = transfer.plan(RECIPES["lm-tiny"](), "head_dim", (16, 32), preset, label)
    measured = transfer.Measured(study, 3)
    for at in (0, 1):
        for rate in range(-18, -9):
            for seed in range(3):
                loss = (
                    2
                    + 0.1 * (rate / 2 + 7.2) ** 2
                    + 0.001 * np.random.default_rng([at, -rate, seed]).normal()
                )
                measured.rows[at, rate, seed] = Row(
                    "", "", loss, None, None, (), 800, 1.0, "in turn"
                )
    return measured, analyse(study.sizes, [measured.curve(at) for at in (0, 1)])


@pytest.mark.parametrize(
    "preset",
    [
        PresetConfig(name="mup-half"),
        PresetConfig(name="depth-mup", alpha_l=1.0, constants=("c_a=0.5", "rates.readout=4")),
    ],
    ids=lambda preset: preset.name,
)
def test_a_study_becomes_a_tuned_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: PresetConfig
):
    monkeypatch.chdir(tmp_path)
    path, use = transfer_tuned.save("ours-v1", "x", [judged(preset, "x")], "mupax transfer lm-tiny")
    assert (path, use) == (Path("tuned") / f"{preset.name}.ours-v1.json", f"{preset.name}:ours-v1")
    config = parsed("--preset", use, "--steps", "1600")
    assert config.optimizer.peak_lr == pytest.approx(2**-7.2, rel=0.02)
    assert config.optimizer.warmup_steps == 100
    assert preset_of(config).base == BASE
    assert (
        preset_of(config).choices
        == preset_of(Config(**{**vars(RECIPES["lm-tiny"]()), "preset": preset})).choices
    )
    flagged = preset_of(
        parsed("--preset", use, "--preset.rates.readout", "2", "--preset.stds.readout=3")
    ).choices
    assert flagged == preset_of(config).choices | {"rates.readout": 2.0, "stds.readout": 3.0}
    provenance = tuned.find(use).provenance
    assert (provenance["seen"], len(provenance["sizes"]), len(provenance["loss"])) == (
        800 * 16 * 128,
        2,
        9,
    )
    assert provenance["transfer"][0]["verdict"] == "transfers"


def test_a_study_is_saved_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path, use = transfer_tuned.save(
        "deep/mup.ours-v2.json", "x", [judged(PresetConfig(), "x")], "a command"
    )
    assert (path, use) == (Path("deep/mup.ours-v2.json"), "mup:deep/mup.ours-v2.json")
    assert parsed("--preset", use).preset.name == "mup"
    with pytest.raises(ConfigError, match=r"write a file name mup\.NAME\.json"):
        transfer_tuned.check_name("deep/other.json", "mup")
    with pytest.raises(PresetError, match="small letters"):
        transfer_tuned.check_name("Über", "mup")


def test_a_study_without_a_minimum_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    measured, _ = judged(PresetConfig(), "x")
    measured.rows = {point: row for point, row in measured.rows.items() if point[1] < -14}
    analysis = analyse((16, 32), [measured.curve(at) for at in (0, 1)])
    with pytest.raises(transfer_tuned.NoMinimum, match="no rate to save: at head_dim 16"):
        transfer_tuned.save("ours-v1", "x", [(measured, analysis)], "a command")
    assert not Path("tuned").exists()


def test_a_preset_without_a_finished_study_saves_nothing() -> None:
    with pytest.raises(transfer_tuned.NoMinimum, match="no rate of x to save: its points are not"):
        transfer_tuned.save("ours-v1", "x", [judged(PresetConfig(), "y")], "a command")


# The project's own


def recorded_words(use: str) -> tuple[str, list[str]]:
    """Return the command and the words that made a tuned preset, with its file's place now."""
    name, *words = words_of(committed()[use].provenance["command"])
    folder = "docs/evidence/tuned" if use in tuned.MOVED else "presets/tuned"
    words[words.index("--save-tuned") + 1] = f"{folder}/{use.replace(':', '.', 1)}.json"
    return name, words


@pytest.mark.parametrize("use", sorted(committed()))
def test_the_command_of_every_preset_of_the_project_can_run(
    use: str, capsys: pytest.CaptureFixture[str]
):
    name, words = recorded_words(use)
    path = Path(words[words.index("--save-tuned") + 1])
    assert (EVIDENCE.parents[2] / path).exists()
    preset, _, own = use.partition(":")
    assert transfer_tuned.check_name(str(path), preset) == own
    if name == "tune":
        words += [
            "--data.eval-batch-size",
            "248",
        ]  # it was made on one device, which 250 divides; tests have eight
    assert main([name, *words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    if name == "transfer":
        mlp = 160 if "lm" in own else 256
        assert f"base embed=64,heads=4,kv_heads=4,head_dim=16,mlp={mlp},layers=2" in shown


def test_what_was_searched_beat_its_start():
    searched = [preset for preset in committed().values() if "search" in preset.provenance]
    assert {preset.use for preset in searched} == {SEARCHED, "mup:vit-endless-v1"}
    assert all(preset.provenance["search"]["winner_less_start"]["high"] < 0 for preset in searched)


@pytest.mark.parametrize("use", DECIDED)
def test_presets_from_committed_studies_decide(use: str):
    # Their interval is narrow and meets zero. The others say in the first line what is not known.
    (grown,) = tuned.find(use).provenance["transfer"]
    low, high = grown["drift"]["low"], grown["drift"]["high"]
    assert (high - low) / 2 <= 0.15
    assert low <= 0.15
    assert high >= -0.15
    assert tuned.find(use).evidence == "transfers"


def test_the_first_run_is_its_tuned_preset():
    recipe = RECIPES["lm-laptop"]().resolved()
    config = cli.parse("lm-laptop", RECIPES["lm-laptop"], ["--preset", SEARCHED]).config
    assert config.optimizer == recipe.optimizer
    assert preset_of(config).base == preset_of(recipe).base
    assert preset_of(config).choices == preset_of(recipe).choices
    preset = tuned.find(SEARCHED)
    assert words_of(preset.provenance["command"])[:4] == [
        "tune",
        "lm-laptop",
        "--model",
        "lm-proxy",
    ]
    assert config.optimizer != parsed("--preset", "mup:lm-python-v1").optimizer  # the control
