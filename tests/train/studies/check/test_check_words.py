"""The command of the coordinate check: what wrong words are answered, what a dry run says; models of other kinds, and its committed table."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest

from mupax import presets
from mupax.train.__main__ import main
from mupax.train.studies.check import check
from mupax.zoo import configs
from scripts.check import theory_and_measurement


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "lm-prxy"], "lm-proxy"),
        (["check", "--preset", "mupp"], "mup"),
        (["check", "--grow", "deepness"], "depth"),
        (["check", "--sizes", "1"], "--sizes"),
        (["check", "--grow", "mlp"], "mlp x8"),
        (["check", "--grow", "kv_heads", "--optimizer", "sgd"], "kv_heads x8"),
    ],
)
def test_bad_words_get_one_message(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) <= 10


def test_a_dry_run_of_key_heads_foretells_what_the_check_measures(capsys):
    """Nothing explodes: the measured change of logits goes as the key heads to +0.02."""
    assert main(["check", "lm-proxy", "--preset", "mup", "--grow", "kv_heads", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "change logits after 1: theory says +0.00\n" in out
    assert "explodes" not in out
    # The control: a size of which an output does grow by theory.
    assert main(["check", "lm-proxy", "--preset", "sp", "--grow", "heads", "--dry-run"]) == 0
    assert re.search(r"change logits after 1: theory says \+[\d.]+, explodes", capsys.readouterr().out)


def test_a_model_from_outside_the_zoo_passes():
    example = runpy.run_path(str(Path(__file__).parents[4] / "docs" / "mixer.py"))
    assert example["main"]()


@pytest.mark.core
def test_the_committed_table_has_every_preset_and_nothing_against_theory():
    table = theory_and_measurement.OUT
    rows = json.loads(table.with_suffix(".json").read_text())["studies"]
    assert {row["preset"] for row in rows} == set(presets.PRESETS)
    assert not any(o["verdict"].startswith(("contradicts", "zero")) for row in rows for o in row["observables"])
    assert theory_and_measurement.markdown(rows) == table.with_suffix(".md").read_text()


def test_an_encoder_decoder_grows() -> None:
    # `check ed-tiny --preset mup --grow heads --sizes 3 --seeds 2`: all 104 observables as predicted.
    model = dataclasses.replace(configs.get("ed-tiny"), encoder_depth=5)  # pyright: ignore
    small, large = check.grow(model, "heads", 2)
    assert (small.sizes()["encoder_layers"], large.sizes()["memory"]) == (2, 2 * small.sizes()["memory"])
    batch = check.batch(small)
    assert {name: array.shape[1:] for name, array in batch.items()} == {
        n: of.shape for n, of in small.example().items()
    }
    assert batch["input_mask"].any(axis=1).all()
