"""Fitted law with all that its intervals need: noise, samples, and its error beyond the rows.

Three things make an interval.

* **Parameters.** The law is fitted anew to many resamples of the rows. All losses of a setting move
  together by a draw of how far settings miss the law (at least the noise of the seeds). Settings
  are few, so that none is left out of a resample. Losses at single rates move by new weights of
  their seeds (Rubin's Bayesian bootstrap 1981, widened for few seeds). The means of the priors move
  by the priors' widths.
* **Run.** A run misses the law as settings do, and has a seed.
* **Distance.** The law is fitted without the largest one or two values of each axis. Its error at
  these values, per octave, is taken for its error per octave beyond the rows. There are few such
  fits, so the error is a Student's t around `BEYOND`, as if `BEYOND_FREEDOM` more fits had shown
  that size.

Shapes as in `law.py`: K settings, M rows, S seeds, P parameters, R samples.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mupax import MupaxFailure
from mupax.train.studies.forecast.law import (
    PRIORS,
    RATE,
    SIZE_DECIMALS,
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
"""Number of resamples of the rows, R."""
PRIOR_FREEDOM = 2
"""Degrees of freedom that `MISSES`, `ROW_MISSES` and `SCATTER` each count for in an estimate."""
MISSES = 0.004
"""Expected standard deviation of a setting from the law, as a share of the loss.

A setting is a model, batch and number of tokens, trained at one or more learning rates.
"""
ROW_MISSES = 0.003
"""Expected standard deviation of the loss at one learning rate, in addition to `MISSES`.

It is a share of the loss. All learning rates of a setting share the deviation of `MISSES`.
"""
SCATTER = 0.1
"""Expected standard deviation of measured best learning rates from the law, in octaves."""
BEYOND = 0.003
"""Expected error of a forecast loss, as a share of it per octave beyond the measured sizes."""
RATE_BEYOND = 0.05
"""Expected error of a forecast best rate, in octaves per octave beyond the measured sizes."""
BEYOND_FREEDOM = 3
"""Degrees of freedom that `BEYOND` and `RATE_BEYOND` count for in an estimate."""
MISFIT = 0.03
"""Deviation from its own rows, as a share of the loss, above which a law is refused."""
MIN_VALUES = 3
"""Least number of values of an axis, such as model sizes, from which a law may extrapolate."""
DETERMINED = 0.7
"""Ratio of a parameter's deviation to its prior's below which the rows determine the parameter."""
STARTS = tuple(itertools.product((-1.2, -0.3), (-1.5, -0.5), (-1.5, -0.5)))
"""Logs of the parameters E, a and b from which the first fits begin, one fit from each."""


class NoLaw(MupaxFailure):
    """Failure to fit or apply a law. The text says why."""


class ErrorGrowth(NamedTuple):
    """Growth of a law's error with the distance from its rows, as a Student's t per octave.

    The error is of the natural log of the loss, or of log2 of the best learning rate.

    Attributes:
        deviation: Scale of the Student's t, per octave.
        freedom: Degrees of freedom of the Student's t.
    """

    deviation: float
    freedom: int


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """Scaling law fitted to the rows of a study, with all that intervals of its forecasts need.

    A setting is a model, batch and number of tokens, trained at one or more learning rates. Noise
    is a standard deviation of the natural log of the loss. The fit is repeated on R resamples of
    the rows.

    Attributes:
        points: Rows in the fit, without the settings that were left out.
        rows: The same rows as arrays.
        theta: Values of the P parameters in the order of `rows.names` and in the units of `PRIORS`,
            [P].
        samples: Parameters of each resample, [R, P].
        misses: Noise of settings around the law, in each resample, [R].
        seed: Noise of a single seed in addition to that of the mean over the seeds.
        loss_growth: Error of the log of the loss per octave beyond the rows.
        scatter: Standard deviation of settings' own best rates from the law, in octaves.
        rate_growth: Error of log2 of the best rate per octave beyond the rows.
        notes: Terms and settings that were left out, a sentence each.
    """

    points: Points
    rows: Rows
    theta: np.ndarray
    samples: np.ndarray
    misses: np.ndarray
    seed: float
    loss_growth: ErrorGrowth
    scatter: float
    rate_growth: ErrorGrowth
    notes: tuple[str, ...]

    @property
    def misfit(self) -> float:
        """Share of the loss by which settings miss the law, the median over the resamples."""
        return float(np.median(self.misses))


def fitted(points: Points) -> ScalingLaw:
    """Fit a law to the rows of a study.

    Raises:
        NoLaw: There are too few sizes, no curve has a minimum, or no law of this form describes
            the rows.
    """
    usable = _usable(points)
    num_settings = len(usable.settings)
    rows = rows_of(usable.settings, usable.optima)
    num_values = []
    for column in rows.scale.T:
        num_values.append(len(set(np.round(column, SIZE_DECIMALS))))
    if max(num_values) < MIN_VALUES:
        sizes, lengths, batches = num_values
        raise NoLaw(
            f"{points.label}: the rows that can be used have too few different values (model "
            f"sizes: {sizes}, lengths of training: {lengths}, batches: {batches}); a law needs "
            f"{MIN_VALUES} of one of them{_because(usable.notes)}"
        )
    notes = [*usable.notes, *_missing_terms(rows, num_values)]

    num_seeds = max(1.0, float((~np.isnan(rows.seed_residuals)).sum(axis=1).mean()))
    seed_noise = 0.0
    if num_seeds > 1:
        variance = np.nanmean(rows.seed_residuals**2) * num_seeds / (num_seeds - 1)
        # n / (n - 1), because residuals are from the mean over the same seeds.
        seed_noise = float(np.sqrt(variance))
    # Parameters of the learning rate's term do not fit the levels of settings, so they take up no
    # degree of freedom.
    num_loss_parameters = sum(name not in RATE for name in rows.names)
    freedom = max(0, num_settings - num_loss_parameters)
    # A setting's mean over seeds is itself only known to seed_noise / sqrt(n).
    mean_noise = seed_noise / num_seeds**0.5
    if mean_noise > MISFIT:
        raise NoLaw(
            f"{points.label}: no law: seeds differ by {seed_noise:.1%} of the loss, so their mean "
            f"is known to {mean_noise:.1%} and a law needs {MISFIT:.0%}; train more seeds"
            f"{_because(notes)}"
        )
    central = _central_fit(rows, freedom, mean_noise)
    if not np.isfinite(central.theta).all() or central.setting_noise > MISFIT:
        raise NoLaw(
            f"{points.label}: no law: it misses the rows that it is fitted to by "
            f"{central.setting_noise:.1%} of the loss, where seeds differ by "
            f"{seed_noise:.1%}{_because(notes)}"
        )

    whitening = whitened(rows, central.setting_noise, central.row_noise)
    scatter = _rate_scatter(rows, central.theta)
    loss_growth, rate_growth = _error_growths(
        rows, central.theta, whitening, central.setting_noise, scatter
    )
    # A fixed seed, so that the same rows give the same intervals.
    rng = np.random.default_rng(0)
    # The noise is itself an estimate: its square follows a scaled inverse chi-square.
    chi_square = rng.chisquare(freedom + PRIOR_FREEDOM, SAMPLES)
    misses = central.setting_noise * np.sqrt((freedom + PRIOR_FREEDOM) / chi_square)
    samples = _resampled_fits(rows, central, misses, whitening, rng)
    return ScalingLaw(
        points=dataclasses.replace(points, settings=tuple(usable.settings)),
        rows=rows,
        theta=central.theta,
        samples=samples,
        misses=misses,
        # The mean over seeds already has 1 / num_seeds of a seed's variance, so this is the rest.
        seed=seed_noise * (1 - 1 / num_seeds) ** 0.5,
        loss_growth=loss_growth,
        scatter=scatter,
        rate_growth=rate_growth,
        notes=tuple(notes),
    )


def _deviation(
    squares: np.ndarray, freedom: int, expected: float, prior_freedom: int = PRIOR_FREEDOM
) -> float:
    """Return a standard deviation that pools observed squares with an expected deviation.

    Args:
        squares: Squared deviations that were observed; they may be empty.
        freedom: Degrees of freedom of `squares`.
        expected: Deviation that is expected without any squares.
        prior_freedom: Degrees of freedom that `expected` counts for, by default `PRIOR_FREEDOM`.
    """
    total = prior_freedom * expected**2 + float(squares.sum())
    return float(np.sqrt(total / (prior_freedom + freedom)))


def _because(notes: Sequence[str]) -> str:
    """Return notes in parentheses, for the end of a message, or "" without notes."""
    return f" ({'; '.join(notes)})" if notes else ""


class _Usable(NamedTuple):
    """Settings of a study to which a law can be fitted.

    Attributes:
        settings: Settings, in the order of the points.
        optima: log2 of each setting's own best rate. NaN for a setting without one.
        notes: Settings that were left out, a sentence each.
    """

    settings: list[Setting]
    optima: list[float]
    notes: list[str]


def _usable(points: Points) -> _Usable:
    """Return the settings of a study to which a law can be fitted, with their best rates.

    A setting is left out if all its rates diverged, or if it has three or more rates and its curve
    has no minimum.

    Raises:
        NoLaw: No setting is left, or none has a best rate, although rates vary.
    """
    usable = _Usable([], [], [])
    for setting in points.settings:
        curve = setting.curve
        curve_fit = fit_curve(curve, curve.first)
        # A setting with few rates has no minimum, but its losses still count.
        has_no_minimum = len(setting.x) >= MIN_VALUES and curve_fit.trouble
        if not curve.window().any() or has_no_minimum:
            usable.notes.append(
                f"without {setting.parameters:,} parameters, "
                f"{setting.tokens:,} {setting.config.model.unit}s: {curve_fit.trouble}"
            )
            continue
        usable.settings.append(setting)
        usable.optima.append(curve_fit.optimum)

    rates = set()
    for setting in usable.settings:
        rates.update(float(x) for x in setting.x)
    has_optimum = np.isfinite(usable.optima).any()
    if not usable.settings or (not has_optimum and len(rates) > 1):
        raise NoLaw(
            f"{points.label}: no setting has a best learning rate "
            f"inside its grid{_because(usable.notes)}"
        )
    return usable


def _missing_terms(rows: Rows, num_values: Sequence[int]) -> list[str]:
    """Return a sentence on each of model size, length, batch and learning rate without a term.

    A law has no term in what does not vary in the rows.

    Args:
        num_values: Number of different model sizes, lengths and batches in the rows.
    """
    notes = []
    for name, count in zip(("model size", "length of training", "batch"), num_values, strict=True):
        if count == 1:
            notes.append(f"the {name} does not vary: no term in it")
    if "c" not in rows.names:
        notes.append("the learning rate does not vary, so the law has no best one")
    return notes


class _CentralFit(NamedTuple):
    """Fit to the rows as they were measured, from which the fits to resamples begin.

    A setting is a model, batch and number of tokens, with a row per learning rate. A residual is
    the log of a row's loss less that of the law.

    Attributes:
        theta: Values of the P parameters, [P].
        setting_noise: Standard deviation of the mean residual of a setting.
        row_noise: Standard deviation of a row's residual from the mean of its setting.
    """

    theta: np.ndarray
    setting_noise: float
    row_noise: float


def _central_fit(rows: Rows, freedom: int, least_noise: float) -> _CentralFit:
    """Fit a law to the measured rows, by fits of its parameters and of the noise in turns.

    Args:
        freedom: Degrees of freedom of the settings' deviations from the law.
        least_noise: Standard deviation of the mean over a setting's seeds, in the log of the loss.
            The noise of settings is not taken as less.
    """
    num_settings = len(rows.scale)
    prior_mean = rows.prior[0][None]
    log_losses = rows.log_loss[None]
    # `whitened` needs some noise to begin with.
    setting_noise = MISSES
    row_noise = ROW_MISSES
    theta = _first_fit(rows)
    # The noise weights the fit, and the fit's residuals give the noise.
    for _ in range(3):
        whitening = whitened(rows, setting_noise, row_noise)
        thetas, _ = fit(rows, theta[None], log_losses, prior_mean, whitening)
        theta = thetas[0]
        shared, remainder = _parts(rows, rows.log_loss - predicted(rows, theta[None])[0])
        # A few settings can lie closer to the law by chance than the noise of their seeds allows.
        setting_noise = max(_deviation(shared**2, freedom, MISSES), least_noise)
        row_freedom = len(rows.setting) - num_settings
        row_noise = _deviation(remainder**2, row_freedom, ROW_MISSES)
    return _CentralFit(theta, setting_noise, row_noise)


def _first_fit(rows: Rows) -> np.ndarray:
    """Return the best of the fits that begin at `STARTS`, [P]."""
    prior_mean = rows.prior[0]
    starts = np.repeat(prior_mean[None], len(STARTS), axis=0)
    for column, name in enumerate(("E", "a", "b")):
        if name in rows.names:
            starts[:, rows.names.index(name)] = [start[column] for start in STARTS]
    log_losses = np.broadcast_to(rows.log_loss, (len(starts), len(rows.log_loss)))
    prior_means = np.broadcast_to(prior_mean, starts.shape)
    whitening = whitened(rows, MISSES, ROW_MISSES)
    theta, cost = fit(rows, starts, log_losses, prior_means, whitening)
    # A start may diverge, and argmin would take its NaN for the least.
    return theta[int(np.argmin(np.where(np.isfinite(cost), cost, np.inf)))]


def _parts(rows: Rows, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split residuals into the mean of each of K settings, [K], and each row's deviation, [M].

    Args:
        residual: Log of each row's loss less that of the law, [M].
    """
    shared = np.bincount(rows.setting, residual) / np.bincount(rows.setting)
    return shared, residual - shared[rows.setting]


def _rate_scatter(rows: Rows, theta: np.ndarray) -> float:
    """Return the standard deviation of settings' measured best rates from the law, in octaves.

    It is pooled with the expected deviation `SCATTER`, and equals that if no setting has a best
    rate.
    """
    rate_names = [name for name in ("x0", "p", "q", "r") if name in rows.names]
    deviations = np.zeros(0)
    if rate_names:
        has_optimum = np.isfinite(rows.optima)
        best = best_rate(rows.names, theta[None], rows.scale)[0]
        deviations = (rows.optima - best)[has_optimum]
    # Each fitted parameter takes up one degree of freedom.
    freedom = max(0, len(deviations) - len(rate_names))
    return _deviation(deviations**2, freedom, SCATTER)


def _resampled_fits(
    rows: Rows,
    central: _CentralFit,
    misses: np.ndarray,
    whitening: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the parameters of fits to R resamples of the M rows, [R, P].

    Their spread gives the intervals of the parameters.

    Args:
        central: Fit to the rows themselves, from which all fits begin.
        misses: Noise of settings in each resample, [R].
        whitening: Matrix of `whitened`, [M, M].
    """
    num_settings = len(rows.scale)
    shared = misses[:, None] * rng.standard_normal((SAMPLES, num_settings))
    log_losses = predicted(rows, central.theta[None]) + shared[:, rows.setting]
    log_losses = log_losses + _row_draws(rows, central.row_noise, rng)
    mean, width = rows.prior
    # Random prior means put the priors' widths into the intervals of parameters that the rows do
    # not determine.
    prior_means = mean + width * rng.standard_normal((SAMPLES, len(mean)))
    start = np.broadcast_to(central.theta, prior_means.shape)
    samples, _ = fit(rows, start, log_losses, prior_means, whitening)
    return samples


def _row_draws(rows: Rows, row_noise: float, rng: np.random.Generator) -> np.ndarray:
    """Draw random changes of the log losses of the M rows, for R resamples, [R, M].

    The rows of a setting are its learning rates. A draw gives the setting's seeds new weights, the
    same at all rates, and leaves out the change that all rates share. A row with one seed gets
    normal noise.

    Args:
        row_noise: Standard deviation for rows with one seed.
    """
    num_settings = int(rows.setting.max()) + 1
    num_columns = rows.seed_residuals.shape[1]
    is_run = ~np.isnan(rows.seed_residuals)
    num_seeds = is_run.sum(axis=1)
    # NaN times a weight of 0 would still be NaN.
    residuals = np.where(is_run, rows.seed_residuals, 0)

    # Gamma(1) weights, divided by their sum, are those of the Bayesian bootstrap.
    weight = rng.gamma(1.0, size=(SAMPLES, num_settings, num_columns))[:, rows.setting]
    # Seeds that were not run must not take a part of the weights.
    weight = weight * is_run
    moved = (weight * residuals).sum(axis=2) / weight.sum(axis=2)
    # The Bayesian bootstrap of n seeds has (n - 1) / (n + 1) of the unbiased variance of their
    # mean.
    moved = moved * np.sqrt((num_seeds + 1) / np.maximum(num_seeds - 1, 1))
    sums = np.stack([np.bincount(rows.setting, draw) for draw in moved])
    num_rates = np.bincount(rows.setting)
    # The error that all rates of a setting share is drawn by `misses` already.
    moved = moved - sums[:, rows.setting] / num_rates[rows.setting]
    return np.where(num_seeds > 1, moved, row_noise * rng.standard_normal(moved.shape))


class _Fold(NamedTuple):
    """Settings that a fit leaves out, to measure the law's error beyond the sizes in the fit.

    Attributes:
        left_out: Mask of the K settings, bool [K].
        octaves: log2 of each setting's size along one axis less that of the largest in the fit,
            [K]. Negative for smaller ones.
    """

    left_out: np.ndarray
    octaves: np.ndarray


def _folds(rows: Rows) -> list[_Fold]:
    """Return folds, each of which leaves out the largest value, or the two largest, of one axis.

    The axes are parameters, tokens and batch. A fold must leave at least `MIN_VALUES` values of its
    axis.
    """
    folds = []
    for column in rows.scale.T:
        values = np.unique(np.round(column, SIZE_DECIMALS))
        for num_largest in (1, 2):
            if len(values) - num_largest >= MIN_VALUES:
                octaves = column - values[-num_largest - 1]
                # 1e-3 octaves of tolerance, so that rounding does not leave out the largest value
                # in the fit.
                folds.append(_Fold(octaves > 1e-3, octaves))
    return folds


def _error_growths(
    rows: Rows, theta: np.ndarray, whitening: np.ndarray, setting_noise: float, scatter: float
) -> tuple[ErrorGrowth, ErrorGrowth]:
    """Measure how the law's errors grow beyond its rows, per octave of distance.

    The law is fitted without the largest values of each axis and compared with what was left out.
    The noise that settings have inside of the rows does not count.

    Args:
        theta: Parameters from which the fits begin, [P].
        whitening: Matrix of `whitened` for the M rows, [M, M].
        setting_noise: Standard deviation of settings from the law, in the log of the loss.
        scatter: Standard deviation of settings' own best rates from the law, in octaves.

    Returns:
        Errors of the log of the loss, and of log2 of the best learning rate.
    """
    loss_squares: list[float] = []
    rate_squares: list[float] = []
    folds = _folds(rows)
    if folds:
        # All folds are fitted in one call, as samples that differ in their weights.
        weight = np.stack([~fold.left_out[rows.setting] for fold in folds]).astype(float)
        repeats = (len(folds), 1)
        start = np.tile(theta, repeats)
        log_losses = np.tile(rows.log_loss, repeats)
        prior_mean = np.tile(rows.prior[0], repeats)
        samples, _ = fit(rows, start, log_losses, prior_mean, whitening, weight)
        residuals = rows.log_loss - predicted(rows, samples)
        for fold, residual, sample in zip(folds, residuals, samples, strict=True):
            octaves = fold.octaves[fold.left_out]
            shared, _ = _parts(rows, residual)
            # Only an error above the noise within the rows counts as an error of distance.
            excess = np.maximum(0, shared[fold.left_out] ** 2 - setting_noise**2)
            loss_squares.append(float(np.mean(excess / octaves**2)))
            if "x0" not in rows.names:
                continue
            # Optima that are NaN (no minimum in the grid) drop out by nanmean below.
            best = best_rate(rows.names, sample[None], rows.scale)[0]
            deviations = (rows.optima - best)[fold.left_out]
            rate_excess = np.maximum(0, deviations**2 - scatter**2)
            if np.isfinite(deviations).any():
                rate_squares.append(float(np.nanmean(rate_excess / octaves**2)))
    return _error_growth(loss_squares, BEYOND), _error_growth(rate_squares, RATE_BEYOND)


def _error_growth(squares: Sequence[float], expected: float) -> ErrorGrowth:
    """Pool measured errors per octave with an expected one.

    Args:
        squares: Squared error per octave of each fold, a fit that left out the largest sizes.
        expected: Error per octave that is expected. It counts as much as `BEYOND_FREEDOM` folds.
    """
    deviation = _deviation(np.array(squares), len(squares), expected, BEYOND_FREEDOM)
    return ErrorGrowth(deviation, BEYOND_FREEDOM + len(squares))


def parameters(law: ScalingLaw) -> dict[str, dict[str, float | bool]]:
    """Return the value and 90 % interval of every parameter of a law, in the units of `PRIORS`.

    The result has `value`, `low`, `high` and `of_rows` by name of the parameter. `of_rows` is true
    if the rows determine the parameter, and false if its interval is nearly that of the prior.
    """
    low, high = np.quantile(law.samples, [0.05, 0.95], axis=0)
    width = law.samples.std(axis=0)
    table: dict[str, dict[str, float | bool]] = {}
    for index, name in enumerate(law.rows.names):
        _, prior_width = PRIORS[name]
        table[name] = {
            "value": round(float(law.theta[index]), 5),
            "low": round(float(low[index]), 5),
            "high": round(float(high[index]), 5),
            "of_rows": bool(width[index] < DETERMINED * prior_width),
        }
    return table
