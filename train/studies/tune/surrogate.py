"""Where a search looks next: a Gaussian process over the points so far, and what it says of each constant.

Losses are squashed, excess / (excess + its median), so that cliffs and divergence do not outshout the valley; Matern 5/2 with a
length per constant, noise fitted. New points maximize the expected improvement, several at a time by taking the process' own mean
for those just asked (Ginsbourger et al. 2010, "kriging believer"). Importance is each constant's total Sobol index of the mean
over the ranges (Saltelli et al. 2010, estimator f of table 2): the share of the variance that goes when all others are known.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr

from mupax.train.studies.tune.over import Constant, Point

CANDIDATES = 1024
"""Of each kind, anywhere and near the best, that the next point is chosen from."""
NEAREST = 5
"""Best points that candidates lie near."""
SAMPLES = 2048
"""For the importance."""


def spread(constants: Sequence[Constant], first: int, count: int, seed: int) -> list[Point]:
    """Points evenly over the ranges: a Kronecker sequence on the generalized golden ratio (Roberts 2018).

    Args:
        constants: with their ranges.
        first: index in the sequence of the first one.
        count: how many.
        seed: where the sequence starts.
    """
    size = len(constants)
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (size + 1))
    shift = np.random.default_rng(seed).random(size)
    unit = (
        shift + np.outer(np.arange(first + 1, first + count + 1), ratio ** -np.arange(1, size + 1))
    ) % 1
    return _points(constants, unit)


def ask(
    constants: Sequence[Constant],
    points: Sequence[Point],
    losses: np.ndarray,
    count: int,
    seed: int,
) -> list[Point]:
    """Points to try next, none of which was tried before.

    Args:
        constants: with their ranges.
        points: tried.
        losses: of those [n], inf where one diverged.
        count: how many to ask for.
        seed: of the candidates; the same seed and losses ask for the same points.
    """
    rng = np.random.default_rng([seed, len(points)])
    unit, values = _unit(constants, points), squashed(losses)
    process = fitted(unit, values)
    tried, proposals = set(points), list[Point]()
    for _ in range(count):
        best = unit[np.argsort(values, kind="stable")[:NEAREST]]
        near = best[rng.integers(0, len(best), CANDIDATES)]
        moved = rng.random(near.shape) < np.maximum(0.3, 1.5 / near.shape[1])
        near = near + moved * rng.normal(
            0, 10.0 ** rng.uniform(-2, -0.5, (CANDIDATES, 1)), near.shape
        )
        candidates = np.concatenate([rng.random((CANDIDATES, len(constants))), np.clip(near, 0, 1)])
        gains = _improvement(process, candidates, float(values.min()))
        chosen = (
            p
            for p in _points(constants, candidates[np.argsort(-gains, kind="stable")])
            if p not in tried
        )
        if (point := next(chosen, None)) is None:
            break  # every point of the grid is tried
        tried.add(point)
        proposals.append(point)
        at = _unit(constants, [point])
        unit, values = np.concatenate([unit, at]), np.concatenate([values, process.predict(at)])
        process = fitted(unit, values, process)
    return proposals


def importance(
    constants: Sequence[Constant], points: Sequence[Point], losses: np.ndarray
) -> list[float]:
    """Total Sobol index of every constant, between 0 and 1; together more than 1 where they act jointly.

    Args:
        constants: with their ranges.
        points: tried.
        losses: of those [n], inf where one diverged.
    """
    values, size = squashed(losses), len(constants)
    if np.ptp(values) < 1e-9:  # nothing does anything
        return [0.0] * size
    process = fitted(_unit(constants, points), values)
    a, b = np.random.default_rng(0).random((2, SAMPLES, size))
    whole = process.predict(a)
    variance = float(process.predict(np.concatenate([a, b])).var())
    shares = []
    for i in range(size):
        mixed = a.copy()
        mixed[:, i] = b[:, i]
        shares.append(
            float(((whole - process.predict(mixed)) ** 2).mean() / 2 / max(variance, 1e-12))
        )
    return [min(share, 1.0) for share in shares]


def squashed(losses: np.ndarray) -> np.ndarray:
    """Losses between 0 (the least) and 1 (diverged), in their order."""
    finite = losses[np.isfinite(losses)]
    if not finite.size:
        return np.ones(len(losses))
    excess = np.where(np.isfinite(losses), losses, finite.max()) - finite.min()
    half = float(np.median(finite - finite.min())) or float(excess.max()) or 1.0
    return np.where(np.isfinite(losses), excess / (excess + half), 1.0)


def fitted(unit: np.ndarray, values: np.ndarray, like: Any = None) -> Any:
    """Fit a Gaussian process to values at points of the unit cube.

    Args:
        unit: Points, [n, D].
        values: Values at these points, [n].
        like: Fitted process whose kernel is kept: its length scales, amplitude and noise. By
            default they are those of maximum likelihood.

    Returns:
        A `GaussianProcessRegressor` of scikit-learn.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    lengths: Any = np.ones(unit.shape[1])
    valley = ConstantKernel(1.0, (0.05, 50.0)) * Matern(lengths, (0.1, 20.0), nu=2.5)
    how: Any = (
        {"optimizer": None, "kernel": like.kernel_}
        if like
        else {"kernel": valley + WhiteKernel(0.01, (1e-5, 0.5))}
    )
    process = GaussianProcessRegressor(normalize_y=True, **how)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a length at the end of its bounds: the constant does little
        return process.fit(unit, values)


def _improvement(process: Any, candidates: np.ndarray, least: float) -> np.ndarray:
    mean, deviation = process.predict(candidates, return_std=True)
    deviation = np.maximum(deviation, 1e-9)
    z = (least - mean) / deviation
    return deviation * (z * ndtr(z) + np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


def _unit(constants: Sequence[Constant], points: Sequence[Point]) -> np.ndarray:
    low, high = np.array([constant.steps for constant in constants], float).T
    return (np.array(points, float).reshape(len(points), len(constants)) - low) / np.maximum(
        high - low, 1
    )


def _points(constants: Sequence[Constant], unit: np.ndarray) -> list[Point]:
    low, high = np.array([constant.steps for constant in constants], float).T
    return [tuple(int(step) for step in row) for row in np.rint(low + unit * (high - low))]
