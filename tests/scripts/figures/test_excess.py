"""The claim on the cost of lower learning rates is judged right on made-up losses."""

from __future__ import annotations

import numpy as np
import pytest

from mupax.train.studies.transfer.fit import Curve
from scripts.figures.effective import excess
from scripts.figures.result import Row

SIZES = (64, 128, 256)
NOISE = 0.01
SEEDS = 5


def curve(sharpness: float, best: float = -8.0, seed: int = 0, noise: float = NOISE) -> Curve:
    """Return losses of 2 + sharpness u^2, u octaves from the best rate, from noisy seeds, on half octaves; an octave and a half above it runs
    diverge."""
    x = best + np.arange(-5, 4) / 2
    mean = np.where(x > best + 1.2, np.inf, 2 + sharpness * (x - best) ** 2)
    noise_of = np.random.default_rng(seed).normal(0, noise, (len(x), SEEDS))
    return Curve(x, mean[:, None] + noise_of, SEEDS)


def rows(flat: float, growth: float, control: float) -> dict[bool, list[Row]]:
    """Return rows where `ntk` has the sharpness `flat`, `standard` 0.3 with a growth per doubling and the control one of its own."""
    curves = {
        "standard": [curve(0.3 + growth * n, seed=n) for n in range(3)],
        "ntk": [curve(flat, best=-7.5, seed=10 + n) for n in range(3)],
        "standard, embeddings": [curve(control, best=-9, seed=20 + n) for n in range(3)],
    }
    table = excess.rows("n", SIZES, curves, list(curves))
    return {control: [row for row in table if row.control is control] for control in (False, True)}


@pytest.mark.core
def test_a_true_claim_reproduces_and_its_control_fails():
    by_control = rows(flat=0.05, growth=0.2, control=0.05)
    assert {row.verdict for row in by_control[False]} == {"reproduces"}
    assert {row.verdict for row in by_control[True]} == {"control: fails as it must"}
    for part, expected in (("half", 0.25), ("quarter", 4 * 0.25), ("growth", 0.2)):
        row = next(row for row in by_control[False] if part in row.what)
        assert row.measured == pytest.approx(expected, abs=0.03)


@pytest.mark.core
def test_a_false_claim_does_not_and_neither_does_a_control_like_the_first():
    by_control = rows(flat=0.6, growth=-0.1, control=0.3)
    assert {row.verdict for row in by_control[False] if row.predicted is not None} == {
        "does not reproduce"
    }
    by_control = rows(flat=0.05, growth=0.2, control=0.5)
    assert "control: does not fail, so the check shows nothing" in {
        row.verdict for row in by_control[True]
    }
    by_control = rows(flat=0.3, growth=0.0, control=0.3)
    assert not by_control[True], "where the claim does not hold a control shows nothing"
    claims = [row for row in by_control[False] if row.predicted is not None]
    assert {row.verdict for row in claims} == {"undecided: the interval meets the bound"}


@pytest.mark.core
def test_noise_does_not_choose_the_loss_it_is_compared_with():
    """The own seed of the best of equal rates is no better than another."""
    differences = []
    least = []
    for seed in range(400):
        flat = Curve(np.arange(9) / 2, np.random.default_rng(seed).normal(0, 1, (9, SEEDS)), SEEDS)
        least.append(excess.least(flat).mean())
        differences.append(flat.losses.mean(axis=1).min())
    assert abs(np.mean(least)) < 0.1
    assert np.mean(differences) < -0.5


@pytest.mark.core
def test_what_the_grid_lacks_is_no_number():
    short = curve(0.3)
    short = Curve(short.x[4:], short.losses[4:], SEEDS)
    assert np.isnan(excess.excess(short, 1)).all()
    with pytest.raises(ValueError, match="every rate of the grid diverged"):
        excess.best(Curve(short.x, np.full_like(short.losses, np.inf), SEEDS))
    with pytest.raises(ValueError, match="at least 2"):
        excess.best(Curve(short.x, short.losses[:, :1], 1))


@pytest.mark.core
def test_of_one_size_nothing_grows():
    curves = {"standard": [curve(0.5)], "ntk": [curve(0.1, seed=1)]}
    assert [row.what[-6:] for row in excess.rows("n", (64,), curves, list(curves))] == [
        "n = 64"
    ] * 2
