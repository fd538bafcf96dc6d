"""Scaling law of the loss in parameters N, tokens D, batch B and learning rate, and its fit.

    log loss = log(E + A N^-a + C D'^-b) + c (x - x*)^2
    D' = D / (1 + B/B_crit)
    x* = x0 + p log2 N + q log2 D + r log2 B

x is log2 of the peak learning rate, x* its best value.

* **E + A N^-a + C D^-b** is approach 3 of Hoffmann et al. 2022 (2203.15556). As there, it is fitted
  to the log of the loss under Huber's loss.
* **D'** is from McCandlish et al. 2018 (1812.06162): a batch beyond the critical one costs tokens.
* **x*** moves by powers of N, D and B (Bjorck et al. 2024, 2409.19913; Step Law, 2503.04715).

A term is left out if its axis does not vary in the rows. Every parameter has a wide prior
(`PRIORS`). A parameter that the rows determine badly stays near published values, and the width of
its prior is part of every interval. The fit is by Levenberg and Marquardt, many samples at a time.

Shapes: K settings, M rows (a setting at one rate), S seeds, P parameters of the law, R samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

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
"""Mean and standard deviation of the normal prior of each parameter of the law.

* E, A, a, C, b and c are natural logs. E, A and C are relative to the rows' median loss, at the
  rows' mean scale. The means of a and b are the exponents of Hoffmann et al.
* B_crit and x0 are octaves from the rows' mean batch and best rate.
* p, q and r are octaves of rate per octave.
"""
NEEDS = {"A": 0, "a": 0, "C": 1, "b": 1, "B_crit": 2, "p": 0, "q": 1, "r": 2}
"""Index in `AXES` of the axis that must vary for a parameter of the law. Others need none."""
RATE = ("c", "x0", "p", "q", "r")
"""Parameters of the law's term in the learning rate."""
SIZE_DECIMALS = 6
"""Decimals of log2 of a size to which sizes are rounded to find equal ones."""
ITERATIONS = 40
"""Greatest number of steps of a fit."""
HUBER = 2.0
"""Residual of a fit, in standard deviations, above which Huber's loss is linear."""
DIFFERENCE = 1e-5
"""Change of a parameter in the forward differences that give the law's derivatives."""
CONVERGED = 1e-6
"""Relative change of the cost below which a fit has converged."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Measured losses of a study as arrays, to which a law is fitted.

    K settings are models, batches and numbers of tokens. M rows are settings at single learning
    rates, those near each setting's best one (`Curve.window`). S is the number of seeds.

    Attributes:
        scale: log2 of parameters, tokens and batch of each setting less their mean, [K, 3].
        centre: Mean of log2 of parameters, tokens and batch, [3].
        setting: Index of each row's setting, int [M].
        log2_lr: log2 of each row's rate less `centre_log2_lr`, [M].
        centre_log2_lr: Mean of the settings' best rates, as log2. Mean of all rates if no setting
            has a best rate.
        log_loss: Natural log of the seeds' geometric mean loss divided by `centre_loss`, [M].
        centre_loss: Median of the seeds' geometric mean losses.
        seed_residuals: Log of each seed's loss less the mean over seeds, [M, S]. NaN where a seed
            was not run or diverged.
        optima: log2 of each setting's own best rate less `centre_log2_lr`, [K]. NaN without one.
        names: Names of the law's parameters, in the order of `PRIORS`. A term is left out if its
            axis does not vary in the rows.
    """

    scale: np.ndarray
    centre: np.ndarray
    setting: np.ndarray
    log2_lr: np.ndarray
    centre_log2_lr: float
    log_loss: np.ndarray
    centre_loss: float
    seed_residuals: np.ndarray
    optima: np.ndarray
    names: tuple[str, ...]

    @property
    def prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the priors of the law's P parameters, [P] each.

        They are in the order of `names` and in the units of `PRIORS`, some of which are logs.
        """
        mean, deviation = np.array([PRIORS[name] for name in self.names]).T
        return mean, deviation


def rows_of(settings: Sequence[Setting], optima: Sequence[float]) -> Rows:
    """Return the losses of settings as arrays, at the rates near each setting's best rate.

    Args:
        settings: Settings with at least one rate that trained.
        optima: log2 of each setting's own best rate. NaN for a setting without one.
    """
    windows = [setting.curve.window() for setting in settings]
    num_rates = [window.sum() for window in windows]
    index = np.repeat(np.arange(len(settings)), num_rates)
    num_seeds = max(setting.losses.shape[1] for setting in settings)
    rates = []
    # NaN marks seeds that a setting does not have, since settings may differ in their seeds.
    losses = np.full((len(index), num_seeds), np.nan)
    for number, (setting, window) in enumerate(zip(settings, windows, strict=True)):
        rates.append(setting.x[window])
        losses[index == number, : setting.losses.shape[1]] = setting.losses[window]
    log2_lr = np.concatenate(rates)
    # Seeds that diverged are left out of the mean.
    log_losses = np.log(np.where(np.isfinite(losses), losses, np.nan))
    mean = np.nanmean(log_losses, axis=1)
    median = float(np.median(mean))

    best = np.asarray(optima, float)
    has_optimum = bool(np.isfinite(best).any())
    centre_log2_lr = float(np.nanmean(best)) if has_optimum else float(log2_lr.mean())

    scale = np.array([setting.scale for setting in settings])
    # Centred, so that the fitted constants describe the middle of the rows and not an extrapolation
    # to size 1.
    centre = scale.mean(axis=0)
    varies = []
    for column in scale.T:
        # Rounded, because equal sizes may differ in the last bits of their log2.
        varies.append(len(set(np.round(column, SIZE_DECIMALS))) > 1)
    return Rows(
        scale=scale - centre,
        centre=centre,
        setting=index,
        log2_lr=log2_lr - centre_log2_lr,
        centre_log2_lr=centre_log2_lr,
        log_loss=mean - median,
        centre_loss=math.exp(median),
        seed_residuals=log_losses - mean[:, None],
        optima=best - centre_log2_lr,
        names=_parameter_names(varies, has_optimum),
    )


def _parameter_names(varies: Sequence[bool], has_optimum: bool) -> tuple[str, ...]:
    """Return the names of the parameters of a law for some rows, in the order of `PRIORS`.

    A term is left out if its axis does not vary. The terms of the learning rate are left out if no
    setting has a best rate. C and b stay if the batch varies, because B_crit acts on their term.

    Args:
        varies: Whether each axis of `AXES` varies in the rows.
        has_optimum: Whether any setting has a best rate.
    """
    names = set()
    for name in PRIORS:
        axis_varies = name not in NEEDS or varies[NEEDS[name]]
        if axis_varies and (has_optimum or name not in RATE):
            names.add(name)
    if "B_crit" in names:
        # B_crit changes the term of the tokens, which is needed even if tokens do not vary.
        names |= {"C", "b"}
    return tuple(name for name in PRIORS if name in names)


def log_loss(names: Sequence[str], theta: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the law's loss at the best rate, as natural log of its ratio to `Rows.centre_loss`.

    The result is [R, n], for R samples of the law's P parameters and n sizes.

    Args:
        names: Names of the parameters, P of them.
        theta: Values of the parameters, [R, P].
        scale: log2 of parameters, tokens and batch less the rows' mean, [n, 3].
    """
    value = {}
    for name, column in zip(names, theta.T, strict=True):
        value[name] = column[:, None]
    parameters, tokens, batch = scale.T
    terms = [np.broadcast_to(value["E"], (len(theta), len(scale)))]
    if "A" in value:
        # exp keeps the exponent positive, so that more parameters never hurt.
        terms.append(value["A"] - np.exp(value["a"]) * math.log(2) * parameters)
    if "C" in value:
        if "B_crit" in value:
            # `cost` is log2(1 + B/B_crit). C is defined at the mean batch, whose cost is added
            # back.
            cost = np.logaddexp2(0, batch - value["B_crit"])
            tokens = tokens - cost + np.logaddexp2(0, -value["B_crit"])
        terms.append(value["C"] - np.exp(value["b"]) * math.log(2) * tokens)
    # E, A and C are logs, so the sum of the law is a log-sum-exp and cannot underflow.
    return np.logaddexp.reduce(np.stack(terms), axis=0)


def best_rate(names: Sequence[str], theta: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return log2 of the law's best learning rate less `Rows.centre_log2_lr`.

    The result is [R, n], for R samples of the law's P parameters and n sizes.

    Args:
        names: Names of the parameters, P of them, which must include `x0`.
        theta: Values of the parameters, [R, P].
        scale: log2 of parameters, tokens and batch less the rows' mean, [n, 3].
    """
    value = {}
    for name, column in zip(names, theta.T, strict=True):
        value[name] = column[:, None]
    moved = 0
    for name, column in zip("pqr", scale.T, strict=True):
        if name in value:
            moved = moved + value[name] * column
    return value["x0"] + moved


def predicted(rows: Rows, theta: np.ndarray) -> np.ndarray:
    """Return the law's loss of every row, as natural log of its ratio to `Rows.centre_loss`.

    The result is [R, M], for R samples of the law's P parameters and M rows. The loss is that at
    the row's learning rate, or at the best rate if the law has no rate term `c`.

    Args:
        rows: Rows to which the law is fitted.
        theta: Values of the parameters, [R, P].
    """
    # Computed once per setting and spread over its rows, which differ in the rate alone.
    least = log_loss(rows.names, theta, rows.scale)[:, rows.setting]
    if "c" not in rows.names:
        return least
    curvature = np.exp(theta[:, rows.names.index("c")])[:, None]
    best = best_rate(rows.names, theta, rows.scale)[:, rows.setting]
    return least + curvature * (rows.log2_lr - best) ** 2


def whitened(rows: Rows, setting_noise: float, row_noise: float) -> np.ndarray:
    """Return the matrix [M, M] that makes residuals of M rows uncorrelated and of unit variance.

    A residual is the log of a row's loss less that of the law.

    Args:
        rows: Rows to which the law is fitted. Rows of one setting differ in the learning rate.
        setting_noise: Standard deviation of the part of a residual that all rows of a setting
            share.
        row_noise: Standard deviation of the part that each row has for itself.
    """
    same_setting = rows.setting[:, None] == rows.setting[None, :]
    # All rates of a setting miss the law together, so a setting counts nearly as one observation.
    covariance = setting_noise**2 * same_setting + row_noise**2 * np.eye(len(rows.setting))
    # With covariance L L', the residuals L^-1 r have unit covariance.
    return np.linalg.inv(np.linalg.cholesky(covariance))


class _Misfit(NamedTuple):
    """Misfit of a law to each of R samples of the losses of M rows.

    Attributes:
        residuals: Whitened residuals, [R, M].
        huber_weight: Weights with which least squares have the gradient of Huber's loss, [R, M].
        cost: Huber's loss plus the penalty of the priors, [R].
    """

    residuals: np.ndarray
    huber_weight: np.ndarray
    cost: np.ndarray


def fit(
    rows: Rows,
    start: np.ndarray,
    log_losses: np.ndarray,
    prior_mean: np.ndarray,
    whitening: np.ndarray,
    weight: np.ndarray | float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Fit the law's P parameters to each of R samples of the losses of M rows, all at once.

    The fit stops after at most `ITERATIONS` steps, whether or not it has converged.

    Args:
        rows: Rows whose scales and rates all samples share.
        start: Parameters from which the fit begins, [R, P].
        log_losses: Log losses of each sample, as `Rows.log_loss`, [R, M].
        prior_mean: Means of the priors of each sample, [R, P].
        whitening: Matrix of `whitened`, [M, M].
        weight: Weight of each row in each sample, [R, M]. 0 leaves a row out. The rows of a setting
            need the same weight.

    Returns:
        Parameters [R, P], and costs [R]: Huber's loss plus the penalty of the priors.
    """
    _, prior_deviation = rows.prior
    identity = np.eye(len(rows.names))

    def evaluate(theta: np.ndarray) -> _Misfit:
        residuals = (log_losses - predicted(rows, theta)) @ whitening.T * weight
        size = np.abs(residuals)
        huber = np.where(size <= HUBER, residuals**2, 2 * HUBER * size - HUBER**2).sum(axis=1)
        penalty = (((theta - prior_mean) / prior_deviation) ** 2).sum(1)
        # 1e-12 only avoids a division by 0. Residuals below HUBER have weight 1 anyway.
        huber_weight = np.minimum(1, HUBER / np.maximum(size, 1e-12))
        return _Misfit(residuals, huber_weight, huber + penalty)

    theta = start.copy()
    # Each sample has a damping of its own, because samples converge at different speed.
    damping = np.full(len(start), 1e-2)
    misfit = evaluate(theta)
    for _ in range(ITERATIONS):
        # Residuals are whitened, so their slopes must be, too.
        slopes_RMP = whitening @ _slopes(rows, theta)
        slopes_RMP = slopes_RMP * np.broadcast_to(weight, misfit.residuals.shape)[..., None]
        weighted_RPM = (slopes_RMP * misfit.huber_weight[..., None]).swapaxes(1, 2)
        normal_RPP = weighted_RPM @ slopes_RMP + np.diag(prior_deviation**-2.0)
        downhill_RP = (weighted_RPM @ misfit.residuals[..., None])[..., 0]
        downhill_RP = downhill_RP + (prior_mean - theta) / prior_deviation**2
        # Marquardt's damping is relative to the diagonal, so it does not depend on the parameters'
        # units.
        damped_RPP = normal_RPP * (1 + damping[:, None, None] * identity)
        step_RP = np.linalg.solve(damped_RPP, downhill_RP[..., None])[..., 0]
        # At most 2 per step, in logs and octaves, because the law is far from linear.
        proposal = theta + np.clip(step_RP, -2, 2)

        # Samples are independent, so each moves only if its own cost falls.
        new = evaluate(proposal)
        better = new.cost < misfit.cost
        better_R1 = better[:, None]
        # 1 + cost: a fit with a cost near 0 would otherwise never converge.
        converged = np.abs(misfit.cost - new.cost) < CONVERGED * (1 + misfit.cost)
        theta = np.where(better_R1, proposal, theta)
        misfit = _Misfit(
            residuals=np.where(better_R1, new.residuals, misfit.residuals),
            huber_weight=np.where(better_R1, new.huber_weight, misfit.huber_weight),
            cost=np.where(better, new.cost, misfit.cost),
        )
        damping = np.clip(np.where(better, damping / 4, damping * 6), 1e-9, 1e9)
        if converged.all():
            break
    return theta, misfit.cost


def _slopes(rows: Rows, theta: np.ndarray) -> np.ndarray:
    """Return derivatives of `predicted` by each of the P parameters, by differences, [R, M, P]."""
    num_parameters = theta.shape[1]
    base_RM = predicted(rows, theta)
    moved_RPP = theta[:, None, :] + DIFFERENCE * np.eye(num_parameters)
    changes = []
    for index in range(num_parameters):
        moved_RM = predicted(rows, moved_RPP[:, index])
        changes.append(moved_RM - base_RM)
    return np.stack(changes, axis=-1) / DIFFERENCE
