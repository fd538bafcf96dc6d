"""The board of forecasts agrees with the scores, and forecasts cannot be changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mupax.train.studies.forecast import record
from scripts.studies import forecasts


def test_a_forecast_that_was_changed_afterwards_is_refused(tmp_path: Path):
    shutil.copytree(forecasts.DOCS / "forecasts" / "backtest-mup", tmp_path / "backtest-mup")
    board = forecasts.collected(tmp_path)
    assert len(board) == 40
    assert all(entry["outcome"] for entry in board)
    (tmp_path / "backtest-mup" / "outcomes" / "points.jsonl.gz").unlink()
    assert not any(entry["outcome"] for entry in forecasts.collected(tmp_path))
    path = tmp_path / "backtest-mup" / "forecasts.json"
    path.write_text(path.read_text().replace('"value": 2.', '"value": 3.', 1))
    with pytest.raises(record.ForecastError, match="is not as it was written"):
        forecasts.collected(tmp_path)


def test_the_reason_why_a_study_supports_no_law_is_complete(tmp_path: Path):
    shutil.copytree(forecasts.DOCS / "transfer" / "ed-heads", tmp_path / "ed-heads")
    for row in forecasts.hindsight(tmp_path):
        # The counts in brackets and what follows them belong to the reason.
        assert "(model sizes: 2, " in row["none"]
        assert row["none"].endswith("; a law needs 3 of one of them")


def test_sp_is_off_by_more_than_mup():
    board = json.loads((forecasts.DOCS / "forecasts.json").read_text())["forecasts"]
    mup, sp = (
        forecasts.summary([entry for entry in board if entry["preset"] == name])
        for name in ("mup", "sp")
    )
    assert mup["median_error"] < sp["median_error"]


@pytest.mark.core
def test_the_page_is_what_was_scored():
    content = json.loads((forecasts.DOCS / "forecasts.json").read_text())
    text = (forecasts.DOCS / "forecasts.md").read_text()
    assert forecasts.page(text, content) == text, (
        "write it again: python -m scripts.studies.forecasts"
    )
    for name, of_folder in content["summary"].items():
        assert (
            forecasts.summary([entry for entry in content["forecasts"] if entry["from"] == name])
            == of_folder
        )


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
