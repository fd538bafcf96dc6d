"""Surrogate of a search: a Gaussian process over the points so far, which chooses new points.

* **Losses** are squashed, excess / (excess + median excess), so that cliffs and diverged points do
  not outweigh the valley.
* **Process.** Matern 5/2 kernel with one length scale per constant. The noise is fitted.
* **New points** maximize the expected improvement. Several at a time are chosen one after another,
  with the process's own mean as the loss of those just chosen (Ginsbourger et al. 2010, "kriging
  believer").
* **Importance** of a constant is its total Sobol index of the process's mean over the ranges
  (Saltelli et al. 2010, estimator f of table 2): the share of the variance that is left when all
  other constants are known.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr

from mupax.train.studies.tune.over import Constant, Point

CANDIDATES = 1024
"""Number of candidates for the next point, of each kind: anywhere, and near the best points."""
NEAREST = 5
"""Number of best points near which candidates lie."""
SAMPLES = 2048
"""Number of random samples from which the importance of a constant is estimated."""


def spread(constants: Sequence[Constant], first: int, count: int, seed: int) -> list[Point]:
    """Return `count` grid points that are spread evenly over the ranges. They may repeat.

    They are terms of a Kronecker sequence on the generalized golden ratio (Roberts 2018).

    Args:
        constants: Constants with their ranges, D of them.
        first: Index of the first term, from 0.
        seed: Seed of the sequence's shift, which is uniform in [0, 1).
    """
    size = len(constants)
    # The root of x^(D + 1) = x + 1, by fixed-point iteration.
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (size + 1))
    shift = np.random.default_rng(seed).random(size)
    # From term 1 on: term 0 is the shift alone.
    terms = np.arange(first + 1, first + count + 1)
    unit = (shift + np.outer(terms, ratio ** -np.arange(1, size + 1))) % 1
    return _points(constants, unit)


def ask(
    constants: Sequence[Constant],
    points: Sequence[Point],
    losses: np.ndarray,
    count: int,
    seed: int,
) -> list[Point]:
    """Return the new points whose expected improvement by the surrogate is largest.

    None of them is in `points`.

    Args:
        points: Points that were tried, n of them.
        losses: Losses at these points [n], inf where one diverged.
        count: Number of new points. Fewer are returned if the grid has no more.
        seed: Seed of the candidates. The same seed and losses give the same points.
    """
    # The seed has the number of points, which grows in every round, so each round draws other
    # candidates.
    rng = np.random.default_rng([seed, len(points)])
    unit = _unit(constants, points)
    values = squashed(losses)
    process = fitted(unit, values)
    tried = set(points)
    proposals = list[Point]()
    for _ in range(count):
        candidates = _candidates(unit, values, rng)
        gains = _improvement(process, candidates, float(values.min()))
        # The grid may round the best candidate to a point that was tried, so all are ranked.
        best_first = _points(constants, candidates[np.argsort(-gains, kind="stable")])
        point = next((point for point in best_first if point not in tried), None)
        if point is None:
            # Every candidate rounds to a point that was tried, so the grid is used up or nearly so.
            break
        tried.add(point)
        proposals.append(point)
        # Kriging believer: the next point is chosen as if this one had the loss of the mean.
        new = _unit(constants, [point])
        believed = process.predict(new)
        unit = np.concatenate([unit, new])
        values = np.concatenate([values, believed])
        # Believed values must not change the length scales, so the kernel is used again.
        process = fitted(unit, values, process)
    return proposals


def _candidates(unit: np.ndarray, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw candidates for the next point in the unit cube, [2 * CANDIDATES, D].

    The first half is uniform. The second half moves some coordinates of the `NEAREST` points with
    the least values.

    Args:
        unit: Points that were tried or just chosen, [n, D].
        values: Values at these points [n]. Less is better.
    """
    best = unit[np.argsort(values, kind="stable")[:NEAREST]]
    near = best[rng.integers(0, len(best), CANDIDATES)]
    # Only some constants move, so that a candidate of many constants stays near its point.
    moved = rng.random(near.shape) < np.maximum(0.3, 1.5 / near.shape[1])
    # Near and far moves alike, because the valley's width is not known.
    distance = 10.0 ** rng.uniform(-2, -0.5, (CANDIDATES, 1))
    near = near + moved * rng.normal(0, distance, near.shape)
    anywhere = rng.random((CANDIDATES, unit.shape[1]))
    return np.concatenate([anywhere, np.clip(near, 0, 1)])


def importance(
    constants: Sequence[Constant], points: Sequence[Point], losses: np.ndarray
) -> list[float]:
    """Return the importance of every constant: its total Sobol index, between 0 and 1.

    It is the share of the variance of the losses that is left when all other constants are known.
    The sum is above 1 if constants act jointly. All are 0 if the losses are equal.

    Args:
        points: Points that were tried, n of them.
        losses: Losses at these points [n], inf where one diverged.
    """
    values = squashed(losses)
    size = len(constants)
    if np.ptp(values) < 1e-9:
        # All losses are equal, so that no constant matters.
        return [0.0] * size

    process = fitted(_unit(constants, points), values)
    first, second = np.random.default_rng(0).random((2, SAMPLES, size))
    means = process.predict(first)
    variance = float(process.predict(np.concatenate([first, second])).var())
    shares = []
    for index in range(size):
        mixed = first.copy()
        mixed[:, index] = second[:, index]
        # Estimator f of Saltelli et al. 2010, table 2: half of the mean square of the change by one
        # constant.
        squares = (means - process.predict(mixed)) ** 2
        share = float(squares.mean() / 2 / max(variance, 1e-12))
        # Sampling may carry the estimate above 1.
        shares.append(min(share, 1.0))
    return shares


def squashed(losses: np.ndarray) -> np.ndarray:
    """Map losses to values between 0 (the least loss) and 1 (diverged), in the same order.

    Very large losses come close to 1, so that they do not dominate a fit.

    Args:
        losses: Losses [n]. A loss that is not finite counts as diverged.
    """
    is_finite = np.isfinite(losses)
    finite = losses[is_finite]
    if not finite.size:
        return np.ones(len(losses))
    excess = np.where(is_finite, losses, finite.max()) - finite.min()
    # The median is 0 if half of the points share the least loss.
    half = float(np.median(finite - finite.min())) or float(excess.max()) or 1.0
    return np.where(is_finite, excess / (excess + half), 1.0)


def fitted(unit: np.ndarray, values: np.ndarray, previous: Any = None) -> Any:
    """Fit a Gaussian process to values at points of the unit cube.

    Args:
        unit: Points, [n, D].
        values: Values at these points, [n].
        previous: Fitted process whose kernel is used again: its length scales, amplitude and noise.
            By default they are those of maximum likelihood.

    Returns:
        A `GaussianProcessRegressor` of scikit-learn.
    """
    # Imported late: scikit-learn takes long to import and only a search needs it.
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    if previous is not None:
        # `Any`, because the annotation of scikit-learn leaves `None` out.
        no_optimizer: Any = None
        process = GaussianProcessRegressor(
            kernel=previous.kernel_, optimizer=no_optimizer, normalize_y=True
        )
    else:
        lengths: Any = np.ones(unit.shape[1])
        valley = ConstantKernel(1.0, (0.05, 50.0)) * Matern(lengths, (0.1, 20.0), nu=2.5)
        kernel = valley + WhiteKernel(0.01, (1e-5, 0.5))
        process = GaussianProcessRegressor(kernel=kernel, normalize_y=True)
    with warnings.catch_warnings():
        # A length scale at the end of its bounds means that the constant does little.
        warnings.simplefilter("ignore")
        return process.fit(unit, values)


def _improvement(process: Any, candidates: np.ndarray, least: float) -> np.ndarray:
    """Return the expected improvement on the value `least` at every candidate, [n]."""
    mean, deviation = process.predict(candidates, return_std=True)
    # scikit-learn sets a variance that rounding makes negative to 0, and z divides by the
    # deviation.
    deviation = np.maximum(deviation, 1e-9)
    z = (least - mean) / deviation
    return deviation * (z * ndtr(z) + np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


def _bounds(constants: Sequence[Constant]) -> tuple[np.ndarray, np.ndarray]:
    """Return least and greatest grid step of every constant, [D] each."""
    low, high = np.array([constant.steps for constant in constants], float).T
    return low, high


def _unit(constants: Sequence[Constant], points: Sequence[Point]) -> np.ndarray:
    """Return points as coordinates in the unit cube, [n, D]. The ranges are its sides."""
    low, high = _bounds(constants)
    steps = np.array(points, float).reshape(len(points), len(constants))
    # A range of one step has no width to divide by.
    return (steps - low) / np.maximum(high - low, 1)


def _points(constants: Sequence[Constant], unit: np.ndarray) -> list[Point]:
    """Return the grid points nearest to coordinates in the unit cube [n, D]."""
    low, high = _bounds(constants)
    steps = np.rint(low + unit * (high - low))
    points = []
    for row in steps:
        points.append(tuple(int(step) for step in row))
    return points
