"""Muon has two peak learning rates: of its matrices, and of the parameters that Adam trains."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mupax import train
from mupax.presets.tuned import find
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.core.muon import hidden_matrices
from mupax.train.core.program import Program, assemble
from mupax.train.studies.sweep.sweep import shape_of
from mupax.train.studies.transfer import tuned
from mupax.zoo.configs import ConfigError

pytestmark = pytest.mark.core

WORDS = (
    "--model.width 16 --model.num-heads 2 --model.depth 2 --model.seq-len 8 --data.batch-size 8 "
    "--optimizer.name muon --optimizer.peak-lr 0.02 --steps 3 --optimizer.warmup-steps 1 "
    "--data.eval-batch-size 8 --data.eval-examples 8 --log.no-samples --log.no-tensorboard"
)
EVIDENCE = {
    "sizes": [{"embed": 16}],
    "seeds": 1,
    "log2_lr": [-6.0, -5.0, -4.0],
    "loss": [2.1, 2.0, 2.1],
    "log2_optimum": {"value": -5.0, "low": None, "high": None},
    "transfer": [],
}


def config_of(words: str = "") -> Config:
    argv = f"{WORDS} {words}".split()
    return cli.parse("lm-tiny", RECIPES["lm-tiny"], argv).config


def program_of(words: str = "") -> Program:
    return assemble(config_of(words), jax.devices()[:1])


def losses(words: str, workdir: Path) -> list[float]:
    train.fit(dataclasses.replace(config_of(words), workdir=str(workdir)))
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_the_adam_part_has_its_own_peak() -> None:
    one = program_of()
    two = program_of("--optimizer.adam-lr 0.16")
    matrices = hidden_matrices(one.definition.specs)
    assert matrices
    assert set(matrices) != set(one.inputs.factors.lr)
    for name, factor in one.inputs.factors.lr.items():
        ratio = 1.0 if name in matrices else 8.0
        np.testing.assert_allclose(two.inputs.factors.lr[name], ratio * factor, rtol=1e-6)
    assert two.inputs.hyper.peak_lr == one.inputs.hyper.peak_lr


def test_without_it_there_is_one_peak() -> None:
    one = program_of()
    equal = program_of("--optimizer.adam-lr 0.02")
    for name, factor in one.inputs.factors.lr.items():
        np.testing.assert_array_equal(equal.inputs.factors.lr[name], factor)


def test_the_matrices_peak_does_not_move_the_adam_part() -> None:
    low = program_of("--optimizer.adam-lr 0.16")
    high = program_of("--optimizer.adam-lr 0.16 --optimizer.peak-lr 0.08")
    matrices = hidden_matrices(low.definition.specs)
    for name in low.inputs.factors.lr:
        rates = [p.inputs.factors.lr[name] * p.inputs.hyper.peak_lr for p in (low, high)]
        ratio = 4.0 if name in matrices else 1.0
        np.testing.assert_allclose(rates[1], ratio * rates[0], rtol=1e-6)


def test_a_joint_rule_scales_each_part_by_its_own_column() -> None:
    base = "--joint completed-muon --preset.base lm-proxy,batch=4,tokens=48 --optimizer.b2 0.99"
    # Twice the batch and four times the tokens: 3 steps of 8 examples of 8 tokens.
    for words, adam_peak in (("", 0.02), ("--optimizer.adam-lr 0.16", 0.16)):
        usual = program_of(words)
        scaled = program_of(f"{words} {base}")
        np.testing.assert_allclose(scaled.inputs.hyper.peak_lr, 0.02 * 2**0.5 * 4**-0.3, rtol=1e-6)
        matrices = hidden_matrices(usual.definition.specs)
        for name, factor in usual.inputs.factors.lr.items():
            rate = scaled.inputs.factors.lr[name] * scaled.inputs.hyper.peak_lr
            usual_rate = factor * usual.inputs.hyper.peak_lr
            column = 2**0.5 * 4**-0.3 if name in matrices else (2 / 4) ** 0.5
            np.testing.assert_allclose(rate, column * usual_rate, rtol=1e-6)
        assert scaled.config.scaled_optimizer.adam_peak == pytest.approx(adam_peak * 0.5**0.5)


def test_points_with_other_peaks_share_a_program() -> None:
    shapes = [
        shape_of(config_of(words))
        for words in ("", "--optimizer.adam-lr 0.16", "--optimizer.adam-lr 0.04")
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    other = shape_of(config_of("--optimizer.orthogonalizer polar_express"))
    assert other != shapes[0]


def test_a_run_trains_with_both_and_the_screen_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = losses("", tmp_path / "shipped")
    assert "Adam at" not in capsys.readouterr().out
    raised = losses("--optimizer.adam-lr 0.16", tmp_path / "raised")
    assert "muon at 0.02 and Adam at 0.16" in capsys.readouterr().out.replace("\n", " ")
    assert raised[0] == shipped[0]
    assert raised[-1] != shipped[-1]


def test_other_optimizers_do_not_read_a_recipes_second_peak() -> None:
    config = config_of("--optimizer.adam-lr 0.16")
    adamw = dataclasses.replace(config.optimizer, name="adamw")
    assert adamw.adam_peak is None
    one = dataclasses.replace(adamw, adam_lr=None)
    programs = [
        assemble(dataclasses.replace(config, optimizer=optimizer), jax.devices()[:1])
        for optimizer in (adamw, one)
    ]
    for name, factor in programs[1].inputs.factors.lr.items():
        np.testing.assert_array_equal(programs[0].inputs.factors.lr[name], factor)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer.name adamw --optimizer.adam-lr 0.1", "is not read by adamw"),
        ("--optimizer.name adamw --optimizer.orthogonalizer polar_express", "is not read by adamw"),
        ("--optimizer.adam-lr -1", "write a number of at least 0"),
        ("--optimizer.adam-lr 0.1 --optimizer.peak-lr 0", "write a peak_lr above 0"),
    ],
)
def test_what_has_no_effect_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(words)


def test_a_tuned_preset_keeps_both_peaks(tmp_path: Path) -> None:
    words = "--optimizer.adam-lr 0.16 --optimizer.orthogonalizer polar_express"
    path, word = tuned.write(
        str(tmp_path / "mup.two-v1.json"), config_of(words), 0.02, EVIDENCE, "x"
    )
    assert find.load(path).optimizer["adam_lr"] == 0.16
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], ["--preset", word]).config
    assert config.optimizer.adam_lr == 0.16
    assert config.optimizer.orthogonalizer == "polar_express"


def test_a_tuned_preset_with_one_peak_replaces_a_recipes_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, word = tuned.write(str(tmp_path / "mup.one-v1.json"), config_of(), 0.02, EVIDENCE, "x")

    def recipe() -> Config:
        return config_of("--optimizer.adam-lr 0.16 --optimizer.orthogonalizer polar_express")

    monkeypatch.setitem(RECIPES, "two-peaks", recipe)
    config = cli.parse("two-peaks", recipe, ["--preset", word]).config
    assert config.optimizer.adam_lr is None
    assert config.optimizer.orthogonalizer == "newton_schulz"
