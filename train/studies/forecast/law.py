"""The law: loss as a function of parameters N, tokens D, batch B and learning rate, and its fit to many rows at once.

    log loss = log(E + A N^-a + C D'^-b) + c (x - x*)^2,   D' = D / (1 + B/B_crit),   x* = x0 + p log2 N + q log2 D + r log2 B

E + A N^-a + C D^-b is Hoffmann et al. 2022 (2203.15556), approach 3, fitted as there to the log of the loss under Huber's; D' is
McCandlish et al. 2018 (1812.06162): a batch beyond the critical one costs tokens. x is log2 of the peak learning rate, around a best
one that moves by powers of N, D and B (Bjorck et al. 2024, 2409.19913; Step Law, 2503.04715). A term whose axis does not vary in
the rows is left out. Every parameter has a wide prior (`PRIORS`), so that what rows determine badly stays near what others
measured, and its width is in every interval; parameters are fitted by Levenberg and Marquardt, many samples at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mupax.train.studies.forecast.points import Setting

AXES: tuple[str, ...] = ("parameters", "tokens", "batch")
PRIORS = {
    "E": (math.log(0.5), 0.7),
    "A": (math.log(0.25), 1.0),
    "a": (math.log(0.34), 0.7),
    "C": (math.log(0.25), 1.0),
    "b": (math.log(0.28), 0.7),
    "B_crit": (0.0, 3.0),
    "c": (math.log(0.01), 1.5),
    "x0": (0.0, 3.0),
    "p": (0.0, 0.5),
    "q": (0.0, 0.5),
    "r": (0.0, 0.5),
}
"""Mean and standard deviation of each parameter as it is fitted: E, A, a, C, b and c by their natural logs, E, A and C over the
rows' median loss at the rows' mean scale; B_crit and x0 in octaves from the rows' mean batch and best rate; p, q, r in octaves of
rate per octave. The exponents' means are those of Hoffmann et al."""
NEEDS = {"A": 0, "a": 0, "C": 1, "b": 1, "B_crit": 2, "p": 0, "q": 1, "r": 2}
"""Parameter to the axis that must vary for it."""
RATE = ("c", "x0", "p", "q", "r")
ITERATIONS, HUBER = 40, 2.0
"""Most steps of a fit; and the residual, in standard deviations, from which on it counts linearly."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Settings as arrays, of the rates that their curves' parabolas take.

    Attributes:
        scale: log2 of parameters, tokens and batch of each setting [K, 3], over the settings' mean.
        centre: that mean [3].
        at: setting of each row [M].
        x: log2 rate of each row, over their mean [M].
        middle: that mean.
        y: log of the seeds' mean loss over the median one [M].
        loss: that median.
        seeds: log of each seed's loss less their mean [M, S]; nan where it was not run.
        optima: log2 of each setting's own best rate over `middle` [K]; nan where it has none.
        names: of the parameters that the rows can say anything about.
    """

    scale: np.ndarray
    centre: np.ndarray
    at: np.ndarray
    x: np.ndarray
    middle: float
    y: np.ndarray
    loss: float
    seeds: np.ndarray
    optima: np.ndarray
    names: tuple[str, ...]

    @property
    def prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the parameters [P], [P]."""
        mean, deviation = np.array([PRIORS[name] for name in self.names]).T
        return mean, deviation


def rows_of(settings: Sequence[Setting], optima: Sequence[float]) -> Rows:
    """Settings as arrays.

    Args:
        settings: each with a rate at which it trained.
        optima: log2 of each one's own best rate; nan where it has none.
    """
    scale = np.array([setting.scale for setting in settings])
    windows = [setting.curve.window() for setting in settings]
    width = max(setting.losses.shape[1] for setting in settings)
    at = np.repeat(np.arange(len(settings)), [window.sum() for window in windows])
    x = np.concatenate(
        [setting.x[window] for setting, window in zip(settings, windows, strict=True)]
    )
    losses = np.full((len(x), width), np.nan)
    for k, (setting, window) in enumerate(zip(settings, windows, strict=True)):
        losses[at == k, : setting.losses.shape[1]] = setting.losses[window]
    losses = np.log(np.where(np.isfinite(losses), losses, np.nan))
    y, best = np.nanmean(losses, axis=1), np.asarray(optima, float)
    middle = float(np.nanmean(best)) if np.isfinite(best).any() else float(x.mean())
    varies = [len(set(np.round(column, 6))) > 1 for column in scale.T]
    rated = np.isfinite(best).any()
    names = tuple(
        n for n in PRIORS if (n not in NEEDS or varies[NEEDS[n]]) and (rated or n not in RATE)
    )
    if "B_crit" in names and "C" not in names:  # tokens do not vary, what a batch costs does
        names = tuple(n for n in PRIORS if n in {*names, "C", "b"})
    centre, loss = scale.mean(axis=0), float(np.median(y))
    seeds = losses - y[:, None]
    return Rows(
        scale - centre,
        centre,
        at,
        x - middle,
        middle,
        y - loss,
        math.exp(loss),
        seeds,
        best - middle,
        names,
    )


def log_loss(names: Sequence[str], theta: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Log of the least loss over the rows' median one [R, M], at the best rate.

    Args:
        names: of the parameters.
        theta: their values [R, P].
        scale: log2 of parameters, tokens and batch over the rows' mean [M, 3].
    """
    value = {name: column[:, None] for name, column in zip(names, theta.T, strict=True)}
    n, d, b = scale.T
    terms = [np.broadcast_to(value["E"], (len(theta), len(scale)))]
    if "A" in value:
        terms.append(value["A"] - np.exp(value["a"]) * math.log(2) * n)
    if "C" in value:
        if "B_crit" in value:
            d = d - np.logaddexp2(0, b - value["B_crit"]) + np.logaddexp2(0, -value["B_crit"])
        terms.append(value["C"] - np.exp(value["b"]) * math.log(2) * d)
    return np.logaddexp.reduce(np.stack(terms), axis=0)


def best_rate(names: Sequence[str], theta: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """log2 of the best rate over `Rows.middle` [R, M]; arguments as `log_loss`.

    Args:
        names, theta, scale: as `log_loss`.
    """
    value = dict(zip(names, theta.T, strict=True))
    slopes = zip("pqr", scale.T, strict=True)
    return value["x0"][:, None] + sum(
        value[n][:, None] * column for n, column in slopes if n in value
    )


def predicted(rows: Rows, theta: np.ndarray) -> np.ndarray:
    """What the law says of every row [R, M].

    Args:
        rows: that it is fitted to.
        theta: parameters [R, P].
    """
    loss = log_loss(rows.names, theta, rows.scale)[:, rows.at]
    if "c" not in rows.names:
        return loss
    curvature = np.exp(theta[:, rows.names.index("c")])[:, None]
    return loss + curvature * (rows.x - best_rate(rows.names, theta, rows.scale)[:, rows.at]) ** 2


def whitened(rows: Rows, setting: float, row: float) -> np.ndarray:
    """The matrix [M, M] that makes residuals of unit variance of those of rows that share their setting's.

    Args:
        rows: of the law.
        setting, row: standard deviations of what rows of a setting share, and of what they do not.
    """
    same = rows.at[:, None] == rows.at[None, :]
    return np.linalg.inv(np.linalg.cholesky(setting**2 * same + row**2 * np.eye(len(rows.at))))


def fit(
    rows: Rows,
    start: np.ndarray,
    y: np.ndarray,
    mean: np.ndarray,
    white: np.ndarray,
    weight: np.ndarray | float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters [R, P] of many samples, and their costs [R].

    Args:
        rows: what they share.
        start: where to begin [R, P].
        y: log losses of each sample [R, M].
        mean: of the priors [R, P].
        white: of `whitened`.
        weight: of each row in each sample [R, M], 0 leaves it out; settings as a whole.
    """
    deviation = rows.prior[1]

    def residuals(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        plain = (y - predicted(rows, theta)) @ white.T * weight
        size = np.abs(plain)
        huber = np.where(size <= HUBER, plain**2, 2 * HUBER * size - HUBER**2).sum(axis=1)
        return (
            plain,
            np.minimum(1, HUBER / np.maximum(size, 1e-12)),
            huber + (((theta - mean) / deviation) ** 2).sum(1),
        )

    theta, damping = start.copy(), np.full(len(start), 1e-2)
    left, share, cost = residuals(theta)
    for _ in range(ITERATIONS):
        moved = theta[:, None, :] + 1e-5 * np.eye(theta.shape[1])  # [R, P, P]
        base = predicted(rows, theta)
        slopes = (
            np.stack([predicted(rows, moved[:, i]) - base for i in range(theta.shape[1])], axis=-1)
            / 1e-5
        )
        slopes = white @ slopes * np.broadcast_to(weight, left.shape)[..., None]
        shared = (slopes * share[..., None]).swapaxes(1, 2)  # [R, P, M]
        normal = shared @ slopes + np.diag(deviation**-2.0)
        downhill = (shared @ left[..., None])[..., 0] + (mean - theta) / deviation**2
        scaled = normal * (1 + damping[:, None, None] * np.eye(theta.shape[1]))
        step = np.clip(np.linalg.solve(scaled, downhill[..., None])[..., 0], -2, 2)
        other = residuals(theta + step)
        better = other[2] < cost
        done = np.abs(cost - other[2]) < 1e-6 * (1 + cost)
        theta = np.where(better[:, None], theta + step, theta)
        left, share = (
            np.where(better[:, None], new, old)
            for new, old in zip(other[:2], (left, share), strict=True)
        )
        cost = np.where(better, other[2], cost)
        damping = np.clip(np.where(better, damping / 4, damping * 6), 1e-9, 1e9)
        if done.all():
            break
    return theta, cost
