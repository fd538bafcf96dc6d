"""The board of forecasts: what the page says is what was scored; and the backtest's two commits, on runs of a known law."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mupax.train.config.run import Config
from mupax.train.studies.forecast import record
from mupax.train.studies.sweep.rows import Row, Rows
from mupax.train.studies.sweep.sweep import key_of
from mupax.zoo import families
from scripts.studies import backtest, forecasts

SPEC = backtest.Backtest(
    small=(2, 4, 8), large=(16, 32), lengths=((100, 8),), longer=((100, 8),), rates=(-9, -8, -7, -6, -5), seeds=1
)


def trained(drift: float):
    """A stand-in for training: rows of a known law, whose best rate moves by `drift` octaves as parameters double."""

    def train(configs: Sequence[Config], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = Rows(folder)
        for config in configs:
            name, count = key_of(config, "data"), families.params(config.model)
            best = -7 + drift * math.log2(count / 14_160)
            least = 1.2 + 20 * count**-0.3 + 3 * config.steps**-0.5
            noise = 0.002 * np.random.default_rng(int(name, 16)).normal()
            loss = least * math.exp(noise + 0.05 * (math.log2(config.optimizer.peak_lr) - best) ** 2)
            rows.add(Row(name, record.command_of(config), loss, loss, None, (loss,), config.steps, 1.0, "in turn"))

    return train


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True)


def test_a_backtest_in_two_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    git(tmp_path, "init")
    for preset, drift in (("mup", 0.0), ("sp", -0.6)):
        monkeypatch.setattr(backtest, "_train", trained(drift))
        spec = dataclasses.replace(SPEC, preset=preset, alike=preset == "mup")
        backtest.study(preset, spec, tmp_path)
        path = backtest.forecasts(preset, spec, tmp_path)
        before = path.read_bytes()
        backtest.forecasts(preset, spec, tmp_path)
        assert path.read_bytes() == before  # what was said stays
        with pytest.raises(SystemExit, match="is not committed as it is"):
            backtest.outcomes(preset, tmp_path)
        git(tmp_path, "add", str(path))
        git(tmp_path, "commit", "-m", preset)
        assert [entry["outcome"] for entry in forecasts.collected(tmp_path) if entry["preset"] == preset] == [
            None,
            None,
        ]
        backtest.outcomes(preset, tmp_path)

    board = forecasts.collected(tmp_path)
    mup, sp = (forecasts.summary([entry for entry in board if entry["preset"] == preset]) for preset in ("mup", "sp"))
    assert (mup["forecasts"], mup["came"], mup["inside90"]) == (2, 2, 1.0)
    assert mup["median_error"] < 0.02
    assert sp["inside90"] == 0.0  # the control: its rate does not transfer
    assert sp["median_error"] > 0.04

    path = tmp_path / "backtest-mup" / "forecasts.json"
    path.write_text(path.read_text().replace('"value": 2.', '"value": 3.', 1))
    with pytest.raises(SystemExit, match="is not committed as it is"):
        backtest.outcomes("mup", tmp_path)
    with pytest.raises(record.ForecastError, match="is not as it was written"):
        forecasts.collected(tmp_path)


@pytest.mark.core
def test_the_page_is_what_was_scored():
    content = json.loads((forecasts.DOCS / "forecasts.json").read_text())
    text = (forecasts.DOCS / "forecasts.md").read_text()
    assert forecasts.page(text, content) == text, "write it again: python -m scripts.studies.forecasts"
    for name, of_folder in content["summary"].items():
        assert forecasts.summary([entry for entry in content["forecasts"] if entry["from"] == name]) == of_folder


@pytest.mark.core
def test_the_board_has_every_forecast_as_it_was_written():
    content = json.loads((forecasts.DOCS / "forecasts.json").read_text())
    written = {
        entry["digest"]: entry
        for path in (forecasts.DOCS / "forecasts").glob("*/forecasts.json")
        for entry in json.loads(path.read_text())
    }
    assert all(record.digest(entry) == digest for digest, entry in written.items())
    assert {entry["digest"] for entry in content["forecasts"]} == set(written)
    for entry in content["forecasts"]:
        assert entry["prediction"] == written[entry["digest"]]["prediction"]
