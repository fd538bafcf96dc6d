"""The committed law of published runs, and the page and forecasts made from it."""

from __future__ import annotations

import numpy as np

from mupax import disk
from scripts.studies import published_runs, published_runs_page

RESULT = disk.read_json(published_runs.RESULT)
FORECAST = published_runs_page.forecasts()


def test_the_page_is_made_from_the_results() -> None:
    text = published_runs.PAGE.read_text()
    assert text == published_runs_page.page(text, RESULT, FORECAST)


def test_every_setting_and_run_that_was_kept_back_is_forecast() -> None:
    assert [(row["parameters"], row["tokens"]) for row in FORECAST] == [
        (n, round(d)) for n, d in published_runs.SETTINGS
    ]
    for row in FORECAST:
        assert row["low"] < row["loss"] < row["high"]
        places = {(point["peak_lr"], point["batch_sequences"]) for point in row["points"]}
        assert len(places) == len(published_runs.RATES) * len(published_runs.BATCHES)
        assert all(point["low"] < point["loss"] < point["high"] for point in row["points"])


def test_left_out_settings_are_forecast_and_controls_are_not() -> None:
    rows = RESULT["left_out"]
    error = np.median([abs(row["error"]) for row in rows])
    assert error <= 0.005
    assert np.median([row["lost"] for row in rows]) <= 0.002
    assert max(row["lost"] for row in rows) <= 0.005
    assert 0.75 <= np.mean([row["points_inside"] for row in rows]) <= 0.98
    assert np.median([row["half_width"] for row in rows]) <= 0.015
    for control in RESULT["controls"].values():
        assert np.median([abs(row["error"]) for row in control]) >= 2 * error


def test_the_sign_of_the_exponent_in_tokens_depends_on_the_batch() -> None:
    rows = {row["batch_sequences"]: row for row in RESULT["exponents"]}
    assert rows[64]["high"] < 0 < rows[1024]["low"]


def test_the_rule_that_the_page_names_is_the_best_simple_one() -> None:
    rules = {name: row for name, row in RESULT["joint"].items() if name in published_runs.JOINT}
    assert min(rules, key=lambda name: rules[name]["worst"]) == "sde, batch as sqrt(tokens)"
