"""The law and its intervals, on losses whose law is known; and rows of which it says nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mupax.train.config import sizes
from mupax.train.config.recipes import lm_tiny
from mupax.train.config.run import Config
from mupax.train.studies.forecast import fitted as fits
from mupax.train.studies.forecast.fitted import NoLaw, ScalingLaw, fitted, parameters
from mupax.train.studies.forecast.points import Points, Setting
from mupax.train.studies.forecast.predict import Prediction, predict

BASE = dataclasses.replace(lm_tiny(), steps=100)
UNIT = BASE.data.batch_size * BASE.model.units
HEADS, STEPS = (8, 16, 32, 64), (100,)
STUDIES = 24


@dataclasses.dataclass(frozen=True)
class Truth:
    """Return log(E + A N^-a + C D^-b) + c (x - x*)^2, with N and D relative to the smallest setting.

    `bend` bends it beyond the largest setting.
    """

    E: float = 1.2
    A: float = 0.5
    a: float = 0.4
    C: float = 0.6
    b: float = 0.3
    c: float = 0.02
    x0: float = -7.0
    p: float = 0.0
    q: float = -0.2
    bend: float = 0.0

    def rate(self, n: float, d: float) -> float:
        return self.x0 + self.p * n + self.q * d

    def loss(self, n: float, d: float, x: np.ndarray) -> np.ndarray:
        least = math.log(self.E + self.A * 2 ** (-self.a * n) + self.C * 2 ** (-self.b * d))
        return (
            least
            + self.c * (x - self.rate(n, d)) ** 2
            + self.bend * max(0.0, n - scale(run(HEADS[-1]))[0])
        )


def run(head_dim: int, steps: int = 100) -> Config:
    return sizes.grown_run(sizes.grown_run(BASE, "head_dim", head_dim), "tokens", steps * UNIT)


def scale(config: Config) -> tuple[float, float]:
    """Octaves of parameters and tokens over the smallest setting's."""
    n, d, _ = Setting.bare(config).scale - SMALLEST
    return float(n), float(d)


SMALLEST = Setting.bare(run(8)).scale


def study(
    truth: Truth,
    rng: np.random.Generator,
    heads: tuple[int, ...] = HEADS,
    steps: tuple[int, ...] = STEPS,
    *,
    noise: float = 0.005,
    lack: float = 0.003,
) -> Points:
    """Return a study of three seeds and nine rates.

    A seed moves all rates of a setting alike, and each of them a little.
    """
    settings = []
    for config in (run(head_dim, length) for head_dim in heads for length in steps):
        n, d = scale(config)
        x = round(truth.rate(n, d) * 2) / 2 + np.arange(-4, 5) / 2
        seeds = (
            rng.normal(0, noise, (1, 3)) + rng.normal(0, noise / 3, (9, 3)) + rng.normal(0, lack)
        )
        settings.append(Setting(config, x, np.exp(truth.loss(n, d, x)[:, None] + seeds), 1.0))
    ordered = sorted(settings, key=lambda setting: tuple(setting.scale))
    return Points("mup", "training", tuple(ordered), "digest", 27 * len(ordered), ("folder",))


def outcomes(
    truths: list[Truth], target: Config, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Prediction, float]]:
    """What was said of one run in each study, and what came."""
    monkeypatch.setattr(fits, "SAMPLES", 100)
    pairs, (n, d) = [], scale(target)
    for number, truth in enumerate(truths):
        rng = np.random.default_rng(number)
        prediction = predict(fitted(study(truth, rng)), target)
        assert prediction.log2_lr is not None
        came = (
            truth.loss(n, d, np.array([prediction.log2_lr.value]))[0]
            + rng.normal(0, 0.005)
            + rng.normal(0, 0.003)
        )
        pairs.append((prediction, math.exp(came)))
    return pairs


def inside(pairs: list[tuple[Prediction, float]]) -> tuple[int, int]:
    """How many came inside the 90 % and the 50 % interval."""
    wide = sum(
        prediction.loss.low90 <= came <= prediction.loss.high90 for prediction, came in pairs
    )
    return wide, sum(
        prediction.loss.low50 <= came <= prediction.loss.high50 for prediction, came in pairs
    )


def test_intervals_hold_what_they_say_four_times_beyond_the_rows(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    truths = [
        Truth(
            E=rng.uniform(0.8, 1.6),
            A=rng.uniform(0.2, 0.8),
            a=rng.uniform(0.2, 0.6),
            p=rng.normal(0, 0.1),
        )
        for _ in range(STUDIES)
    ]
    pairs = outcomes(truths, run(128), monkeypatch)
    wide, narrow = inside(pairs)
    assert wide >= 19  # of 24 at 90 %: fewer come in 3 % of such tests
    assert (
        7 <= narrow <= 22
    )  # at 50 %; wider than they need be, as a law of this form is not taken for certain
    errors = [abs(prediction.loss.value / came - 1) for prediction, came in pairs]
    assert np.median(errors) < 0.01
    rates = [
        (prediction.log2_lr, truth.rate(*scale(run(128))))
        for (prediction, _), truth in zip(pairs, truths, strict=True)
    ]
    assert sum(band is not None and band.low90 <= rate <= band.high90 for band, rate in rates) >= 19


def test_control_a_law_that_bends_beyond_the_rows_is_missed(monkeypatch: pytest.MonkeyPatch):
    pairs = outcomes([Truth(bend=0.05)] * 8, run(256), monkeypatch)
    assert inside(pairs)[0] <= 2


def law_of(
    *, heads: tuple[int, ...] = HEADS, steps: tuple[int, ...] = STEPS, truth: Truth | None = None
) -> ScalingLaw:
    return fitted(
        study(
            truth or Truth(p=-0.5), np.random.default_rng(0), heads, steps, noise=0.001, lack=0.0005
        )
    )


def test_a_law_over_sizes_and_lengths_has_their_exponents():
    law = law_of(heads=(8, 16, 32, 64), steps=(50, 100, 200, 400))
    constants = parameters(law)
    for name, value in {"a": 0.4, "b": 0.3}.items():
        assert math.exp(constants[name]["low"]) <= value <= math.exp(constants[name]["high"])
        assert constants[name]["of_rows"]
    assert constants["p"]["value"] == pytest.approx(-0.5, abs=0.05)
    assert constants["q"]["value"] == pytest.approx(-0.2, abs=0.05)
    assert (
        law.loss_growth.deviation < fits.BEYOND
    )  # leaving the largest out has shown that little is missed
    assert law.notes == ("the batch does not vary: no term in it",)


def test_a_batch_beyond_the_critical_one_costs_tokens():
    rng, critical = np.random.default_rng(0), 16
    settings = []
    for length in (100, 200, 400, 800):
        for batch in (4, 8, 16, 32, 64):
            config = sizes.grown_run(run(16, length), "batch", batch)
            tokens = config.steps * batch * config.model.units / UNIT / 100 / (1 + batch / critical)
            x = -7 + 0.5 * round(math.log2(batch / 16)) + np.arange(-3, 4) / 2
            loss = (
                math.log(1.2 + 0.6 * tokens**-0.3)
                + 0.02 * (x - x[3]) ** 2
                + rng.normal(0, 0.001, len(x))
            )
            settings.append(Setting(config, x, np.exp(loss)[:, None]))
    law = fitted(Points("mup", "training", tuple(settings), "digest", 140, ()))
    constants = parameters(law)
    low, high = (
        2.0 ** (law.rows.centre[2] + float(constants["B_crit"][end])) for end in ("low", "high")
    )
    assert low < critical < high < 4 * low
    assert constants["r"]["value"] == pytest.approx(0.5, abs=0.05)


def test_what_does_not_vary_has_no_term_and_nothing_is_said_of_it():
    law = law_of()
    assert set(law.rows.names) == {"E", "A", "a", "c", "x0", "p"}
    assert "the length of training does not vary: no term in it" in law.notes
    with pytest.raises(
        NoLaw, match="and all measured runs have 204,800; keep tokens at 204,800, or"
    ):
        predict(law, run(64, 200))
    only_tokens = law_of(heads=(16,), steps=(50, 100, 200, 400))
    assert set(only_tokens.rows.names) == {"E", "C", "b", "c", "x0", "q"}


def test_farther_is_less_certain_and_is_said():
    law = law_of()
    widths = []
    for head_dim in (64, 128, 1024):
        prediction = predict(law, run(head_dim))
        widths.append(prediction.loss.high90 / prediction.loss.low90)
        ratio = prediction.scale["parameters"] / predict(law, run(64)).scale["parameters"]
        assert prediction.size_ratios["parameters"] == pytest.approx(ratio)
        words = f"extrapolates: {ratio:.3g} times the parameters of the largest model measured"
        assert prediction.warnings[:1] == ((words,) if ratio > 1 else ())
    assert widths == sorted(widths)
    assert widths[-1] > 2 * widths[0] - 1


def test_two_values_of_an_axis_are_few_and_are_said():
    law = law_of(steps=(100, 200))
    longer, larger = predict(law, run(64, 400)), predict(law, run(128, 200))
    few = (
        "the rows have 2 values of tokens: beyond them the loss follows published laws, "
        "with a wide interval"
    )
    assert few in longer.warnings
    assert few not in larger.warnings


def test_a_run_away_from_the_best_rate_has_its_price():
    law, config = law_of(), run(64)
    best = predict(law, config)
    assert best.log2_lr is not None
    off = dataclasses.replace(config.optimizer, peak_lr=2.0 ** (best.log2_lr.value + 1))
    there = predict(law, dataclasses.replace(config, optimizer=off), keep_rate=True)
    assert there.loss.value / best.loss.value == pytest.approx(math.exp(0.02), abs=0.006)
    assert there.config.optimizer.peak_lr == off.peak_lr


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (16,)}, "model sizes: 1, lengths of training: 1, batches: 1"),
        ({"heads": (16, 32)}, "model sizes: 2, lengths of training: 1, batches: 1"),
        ({"truth": Truth(c=-0.02)}, "end of the grid"),
    ],
)
def test_rows_without_a_law(change: dict, message: str):
    with pytest.raises(NoLaw, match=message):
        law_of(**change)


@pytest.mark.core
def test_rows_that_no_law_describes_have_none():
    points = study(Truth(), np.random.default_rng(0), lack=0.2)
    with pytest.raises(NoLaw, match=r"misses the rows that it is fitted to by \d+"):
        fitted(points)


@pytest.mark.core
def test_seeds_that_differ_by_too_much_are_named_as_the_reason():
    points = study(Truth(), np.random.default_rng(0), noise=0.15)
    with pytest.raises(
        NoLaw, match=r"seeds differ by 1\d\.\d% of the loss, so their mean is known"
    ):
        fitted(points)


@pytest.mark.core
def test_another_run_than_a_larger_one_is_refused_by_name():
    law = law_of()
    other = dataclasses.replace(
        run(64), optimizer=dataclasses.replace(BASE.optimizer, weight_decay=0.5)
    )
    with pytest.raises(NoLaw, match=r"optimizer.weight_decay 0.5 \(measured: 0.0003\)"):
        predict(law, other)
    deeper = predict(law, sizes.grown_run(run(64), "depth", 8))
    assert any("depth is 8, and 4 in every row" in warning for warning in deeper.warnings)
