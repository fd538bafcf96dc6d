"""A law with what is not known of it: noise, samples of its parameters, and how far it misses sizes larger than it has seen.

Three things make an interval. **Parameters**: resamples of the rows, each fitted anew: every setting's losses are moved together by
a draw of what settings miss the law by (they are few, so drawn and not chosen again; at least what the seeds' noise is), each
rate's by a draw of its seeds (Rubin's Bayesian bootstrap 1981, widened for few of them), and the priors' means by their widths.
**A run**: it misses the law as settings do, and has a seed. **Distance**: the law is fitted without the largest one or two values of
each axis, and what it then misses those by, over the octaves between, is what it is taken to miss larger ones by, an octave; as there
are few such fits, that is a Student's t around `BEYOND`, as if two more had been measured.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from mupax.errors import MupaxFailure
from mupax.train.studies.forecast.law import (
    PRIORS,
    RATE,
    Rows,
    best_rate,
    fit,
    predicted,
    rows_of,
    whitened,
)
from mupax.train.studies.forecast.points import Points, Setting
from mupax.train.studies.transfer.fit import fit as fit_curve

SAMPLES = 400
PRIOR_FREEDOM = 2
"""Each deviation is estimated as if so many more had been seen, of the size that follows."""
MISSES, OF_RATE, SCATTER = 0.004, 0.003, 0.1
"""What settings and their rates miss the law by, as shares of the loss; and their best rates, in octaves."""
BEYOND, RATE_BEYOND = 0.003, 0.05
"""Share of the loss, and octaves of rate, that an octave beyond the rows adds, as if `BEYOND_FREEDOM` fits had shown it."""
BEYOND_FREEDOM = 3
MISFIT = 0.03
"""Share of the loss from which on a law that misses its own rows is none."""
LEAST = 3
"""Values of an axis that the law needs to go beyond them."""
STARTS = tuple(itertools.product((-1.2, -0.3), (-1.5, -0.5), (-1.5, -0.5)))
"""E, and both exponents, from which the first fit begins."""


class NoLaw(MupaxFailure):
    """Rows, or a run, of which no law says anything. The text says why."""


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """A fit, and all that its intervals are made of; noises are standard deviations of the log of the loss.

    Attributes:
        points: that it is fitted to, without those left out.
        rows: the same as arrays.
        theta: parameters [P].
        samples: of them [R, P].
        misses: what settings miss it by, in each sample [R].
        seed: what one seed adds to the mean of those that were run.
        beyond: what an octave beyond the rows adds, with its degrees of freedom.
        scatter: octaves by which the settings' own best rates miss it.
        rate_beyond: octaves of rate that an octave beyond the rows adds, with its degrees of freedom.
        notes: which terms and settings were left out.
    """

    points: Points
    rows: Rows
    theta: np.ndarray
    samples: np.ndarray
    misses: np.ndarray
    seed: float
    beyond: tuple[float, int]
    scatter: float
    rate_beyond: tuple[float, int]
    notes: tuple[str, ...]

    @property
    def misfit(self) -> float:
        """Share of the loss by which settings miss the law."""
        return float(np.median(self.misses))


def fitted(points: Points) -> ScalingLaw:
    """The law of a study's rows.

    Raises:
        NoLaw: too few sizes, no minimum in any curve, or rows that no law of this form describes.
    """
    settings, optima, notes = _usable(points)
    rows = rows_of(settings, optima)
    distinct = [len(set(np.round(column, 6))) for column in rows.scale.T]
    if max(distinct) < LEAST:
        raise NoLaw(
            f"{points.label}: the rows have {distinct[0]} model sizes and {distinct[1]} lengths of training that can be used; a law "
            f"needs {LEAST} of either{_because(notes)}"
        )
    notes = [*notes, *_dropped(rows, distinct)]
    seeds = max(1.0, float((~np.isnan(rows.seeds)).sum(axis=1).mean()))
    one = (
        float(np.sqrt(np.nanmean(rows.seeds**2) * seeds / (seeds - 1))) if seeds > 1 else 0.0
    )  # what one seed moves a loss by
    free = max(0, len(settings) - sum(name not in RATE for name in rows.names))
    setting, row, best = MISSES, OF_RATE, _started(rows, MISSES, OF_RATE)
    for _ in range(3):
        best = fit(
            rows, best[None], rows.y[None], rows.prior[0][None], whitened(rows, setting, row)
        )[0][0]
        shared, alone = _parts(rows, rows.y - predicted(rows, best[None])[0])
        setting = max(_deviation(shared**2, free, MISSES), one / seeds**0.5)
        row = _deviation(alone**2, len(rows.at) - len(settings), OF_RATE)
    if not np.isfinite(best).all() or setting > MISFIT:
        raise NoLaw(
            f"{points.label}: no law: it misses the rows that it is fitted to by {setting:.1%} of the loss, where seeds differ by "
            f"{one:.1%}{_because(notes)}"
        )
    rng, white = np.random.default_rng(0), whitened(rows, setting, row)
    rates = [name for name in ("x0", "p", "q", "r") if name in rows.names]
    own = np.isfinite(rows.optima)
    off = (
        (rows.optima - best_rate(rows.names, best[None], rows.scale)[0])[own]
        if rates
        else np.zeros(0)
    )
    scatter = _deviation(off**2, max(0, len(off) - len(rates)), SCATTER)
    beyond, rate_beyond = _left_out(rows, best, white, setting, scatter)
    misses = setting * np.sqrt(
        (free + PRIOR_FREEDOM) / rng.chisquare(free + PRIOR_FREEDOM, SAMPLES)
    )
    y = (
        predicted(rows, best[None])
        + (misses[:, None] * rng.standard_normal((SAMPLES, len(settings))))[:, rows.at]
    )
    y = y + _of_seeds(rows, row, rng)
    mean, width = rows.prior
    means = mean + width * rng.standard_normal((SAMPLES, len(mean)))
    samples, _ = fit(rows, np.broadcast_to(best, means.shape), y, means, white)
    subset = dataclasses.replace(points, settings=tuple(settings))
    return ScalingLaw(
        subset,
        rows,
        best,
        samples,
        misses,
        one * (1 - 1 / seeds) ** 0.5,
        beyond,
        scatter,
        rate_beyond,
        tuple(notes),
    )


def _deviation(
    squares: np.ndarray, freedom: int, expected: float, prior: int = PRIOR_FREEDOM
) -> float:
    return float(np.sqrt((prior * expected**2 + float(squares.sum())) / (prior + freedom)))


def _because(notes: list[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def _usable(points: Points) -> tuple[list[Setting], list[float], list[str]]:
    """Settings that a law can use, each one's own best rate, and what is said of the others."""
    settings, optima, notes = [], [], []
    for setting in points.settings:
        curve = setting.curve
        where = (
            f"{setting.parameters:,} parameters, {setting.tokens:,} {setting.config.model.unit}s"
        )
        own = fit_curve(curve, curve.first)
        if not curve.window().any() or (len(setting.x) >= LEAST and own.trouble):
            notes.append(f"without {where}: {own.trouble}")
            continue
        settings.append(setting)
        optima.append(own.optimum)
    rates = {float(x) for setting in settings for x in setting.x}
    if not settings or (not np.isfinite(optima).any() and len(rates) > 1):
        raise NoLaw(
            f"{points.label}: no setting has a best learning rate inside its grid{_because(notes)}"
        )
    return settings, optima, notes


def _dropped(rows: Rows, distinct: list[int]) -> list[str]:
    what = ("model size", "length of training", "batch")
    still = [what[i] for i, count in enumerate(distinct) if count == 1]
    notes = [f"the {name} does not vary: no term in it" for name in still]
    return (
        notes
        if "c" in rows.names
        else [*notes, "the learning rate does not vary: nothing is said of the best one"]
    )


def _started(rows: Rows, setting: float, row: float) -> np.ndarray:
    """The best of the fits from `STARTS` [P]."""
    mean = rows.prior[0]
    starts = np.repeat(mean[None], len(STARTS), axis=0)
    for column, name in enumerate(("E", "a", "b")):
        if name in rows.names:
            starts[:, rows.names.index(name)] = [start[column] for start in STARTS]
    many = np.broadcast_to(rows.y, (len(starts), len(rows.y)))
    means = np.broadcast_to(mean, starts.shape)
    theta, cost = fit(rows, starts, many, means, whitened(rows, setting, row))
    return theta[int(np.argmin(np.where(np.isfinite(cost), cost, np.inf)))]


def _parts(rows: Rows, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A residual [M] as what rows of a setting share [K], and what is left [M]."""
    shared = np.bincount(rows.at, residual) / np.bincount(rows.at)
    return shared, residual - shared[rows.at]


def _of_seeds(rows: Rows, row: float, rng: np.random.Generator) -> np.ndarray:
    """What rates of a setting do not share, in each sample [R, M]: of other weights of their seeds, the same at all its rates."""
    count = rows.seeds.shape[1]
    weight = rng.gamma(1.0, size=(SAMPLES, int(rows.at.max()) + 1, count))[:, rows.at]
    there = ~np.isnan(rows.seeds)
    weight = weight * there
    moved = (weight * np.where(there, rows.seeds, 0)).sum(axis=2) / weight.sum(axis=2)
    seeds = there.sum(axis=1)
    moved = moved * np.sqrt((seeds + 1) / np.maximum(seeds - 1, 1))
    moved = (
        moved
        - np.stack([np.bincount(rows.at, each) for each in moved])[:, rows.at]
        / np.bincount(rows.at)[rows.at]
    )
    return np.where(seeds > 1, moved, row * rng.standard_normal(moved.shape))


def _left_out(
    rows: Rows, theta: np.ndarray, white: np.ndarray, misses: float, scatter: float
) -> tuple[tuple[float, int], tuple[float, int]]:
    """What an octave beyond the rows adds to loss and best rate, from fits without the largest values of each axis."""
    folds: list[tuple[np.ndarray, np.ndarray]] = []
    for axis in range(rows.scale.shape[1]):
        values = np.unique(np.round(rows.scale[:, axis], 6))
        for largest in (1, 2):
            if len(values) - largest >= LEAST:
                octaves = rows.scale[:, axis] - values[-largest - 1]
                folds.append((octaves > 1e-3, octaves))
    losses, rates = [], []
    if folds:
        weight = np.stack([~without[rows.at] for without, _ in folds]).astype(float)
        many = (len(folds), 1)
        start, y, mean = (np.tile(each, many) for each in (theta, rows.y, rows.prior[0]))
        samples, _ = fit(rows, start, y, mean, white, weight)
        residuals = rows.y - predicted(rows, samples)
        for (without, octaves), residual, sample in zip(folds, residuals, samples, strict=True):
            shared = _parts(rows, residual)[0][without]
            losses.append(np.mean(np.maximum(0, shared**2 - misses**2) / octaves[without] ** 2))
            if "x0" in rows.names:
                off = (rows.optima - best_rate(rows.names, sample[None], rows.scale)[0])[without]
                squares = np.maximum(0, off**2 - scatter**2) / octaves[without] ** 2
                rates += [np.nanmean(squares)] if np.isfinite(off).any() else []
    return _beyond(losses, BEYOND), _beyond(rates, RATE_BEYOND)


def _beyond(squares: list[float], expected: float) -> tuple[float, int]:
    freedom = BEYOND_FREEDOM + len(squares)
    return _deviation(np.array(squares), len(squares), expected, BEYOND_FREEDOM), freedom


def parameters(law: ScalingLaw) -> dict[str, dict[str, float | bool]]:
    """Each parameter as it is fitted, its 90 % interval, and whether the rows say more of it than its prior.

    Args:
        law: whose they are.
    """
    low, high = np.quantile(law.samples, [0.05, 0.95], axis=0)
    width, table = law.samples.std(axis=0), {}
    for at, name in enumerate(law.rows.names):
        ends = {"value": law.theta[at], "low": low[at], "high": high[at]}
        told = bool(width[at] < 0.7 * PRIORS[name][1])
        table[name] = {
            **{key: round(float(value), 5) for key, value in ends.items()},
            "of_rows": told,
        }
    return table
