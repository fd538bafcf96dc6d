"""Figures of loss against learning rate: their runs, their records and their verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from mupax.presets.papers import ALIASES
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer.command import Transfer
from scripts.figures import rates, result
from scripts.figures.effective import fig_effective_trained
from scripts.figures.runs import fig2a

SIZES = (16, 32, 64)
LIMITS = {"seeds": 3, "max_seeds": 3, "minutes": 1.0}


def _made_up(drift: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict:
    """A study whose best learning rate is 2^-6 at 16 and moves by `drift`; an octave above it runs diverge."""

    def run(self, configs):
        return [_row(config, drift) for config in configs]

    monkeypatch.setattr("mupax.train.studies.sweep.sweep.Sweep.run", run)
    grown = []
    for size in SIZES:
        config = fig2a._config(fig2a.FIGURE.small, {"alpha_a": 1.0}, size)
        optimizer = dataclasses.replace(config.optimizer, peak_lr=2.0**-6)
        grown.append(dataclasses.replace(config, optimizer=optimizer))
    studies = rates.measure({"one": grown}, SIZES, LIMITS, tmp_path)
    return json.loads(json.dumps(result._plain(studies)))["one"]


def _row(config, drift: float) -> Row:
    doublings = math.log2(config.model.width / config.model.num_heads / SIZES[0])
    away = math.log2(config.optimizer.peak_lr) + 6 - drift * doublings
    loss = 2 - 0.1 * doublings + 0.05 * away**2 + 0.001 * config.seed * (1 + 0.1 * away)
    if away > 0.9:
        loss = math.inf
    return Row("", "", loss, None, None, (loss,), 1, 0.1, "in turn")


@pytest.mark.parametrize("drift", [0.0, -1.0])
def test_a_drift_is_found_and_judged(
    drift: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = _made_up(drift, monkeypatch, tmp_path)
    row = rates.row("drift", SIZES, study, predicted=0)
    assert row.measured == pytest.approx(drift, abs=0.05)
    assert row.verdict == ("does not reproduce" if drift else "reproduces")
    assert "3 paired seeds; at 64 the best learning rate of 16 " in row.note
    rates.draw("made up", "N", SIZES, {"one": study}).savefig(tmp_path / "one.png")


def test_divergence_and_runs_that_were_not_made_survive_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = _made_up(0.0, monkeypatch, tmp_path)
    assert rates.DIVERGED in np.ravel(np.array(study["losses"], object))
    curves = rates.curves(study)
    assert np.isinf(curves[0].losses).any()
    study["losses"][0][0][1] = None
    assert np.isnan(rates.curves(study)[0].losses[0, 1])


def test_the_runs_of_figure_2a(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs_by_name = {}
    monkeypatch.setattr(rates, "measure", lambda configs, *args: configs_by_name.update(configs))
    fig2a.FIGURE.measure(fig2a.FIGURE.small, tmp_path)
    assert [
        (name, grown[0].preset.name, grown[0].preset.alpha_a)
        for name, grown in configs_by_name.items()
    ] == [
        ("alpha_A = 1", "depth-mup", 1.0),
        ("alpha_A = 1/2", "depth-mup", 0.5),
        ("sp", "sp", None),
    ]
    assert [config.model.width for config in configs_by_name["sp"]] == [32, 64, 128, 256]
    assert [row.control for row in fig2a.rows(fig2a.FIGURE.small, _three())] == [False, False, True]


def _three() -> dict:
    x = [[-1.0, -0.5, 0.0, 0.5, 1.0]] * 4
    losses = [[[1 + v * v] * 3 for v in x[0]]] * 4
    return {
        name: {"x": x, "losses": losses, "first": [3] * 4} for name in fig2a.FIGURE.small["rules"]
    }


def test_the_runs_of_the_effective_theory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs_by_name = {}

    def measured(configs, sizes, limits, work):
        configs_by_name.update(configs)
        Transfer(recipe="lm-tiny", grow=(), **limits)
        assert sizes == [64, 256]
        return {name: {} for name in configs}

    monkeypatch.setattr(rates, "measure", measured)
    studies = fig_effective_trained.FIGURE.measure(fig_effective_trained.FIGURE.small, tmp_path)
    assert {name: of_preset["kept_step"] for name, of_preset in studies.items()} == pytest.approx(
        {"standard": -1.0, "ntk": 0.5, "hybrid": 0.25, "maximal-update": 0.0}
    )
    assert {config.preset.name for grown in configs_by_name.values() for config in grown} == {
        ALIASES.get(name, name) for name in configs_by_name
    }
    assert [config.model.num_heads for config in configs_by_name["ntk"]] == [4, 16]
