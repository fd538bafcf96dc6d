"""Forecasts from a law of the loss: best learning rate and batch, and losses, with intervals.

A setting is a model and a length of training. A 90 % interval of a loss has four parts:

* the Gaussian around the fitted numbers of the law;
* the effect that the runs of a new setting share, with Student's t, since settings are few;
* the noise of one run;
* the distance beyond the runs of the table. Its deviation per octave is measured by fits without
  the largest and the smallest value of an axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from mupax.train.studies.tables.law import AXES, Fit, Form, fitted, form_of, settings_of
from mupax.train.studies.tables.table import RunTable, TableError

SETTING_AXES = ("parameters", "tokens", "flops")
"""Axes of the law that describe a setting (a model and a length of training)."""
DRAWS = 2000
"""Number R of random draws from which an interval is computed."""
LOW, HIGH = 0.05, 0.95
"""Quantiles at the ends of a 90 % interval."""
SHARED_FREEDOM = 6
"""Degrees of freedom of Student's t for the effect that the runs of a setting share."""
RUN_FREEDOM = 4
"""Degrees of freedom of Student's t for the noise of a run, few since outliers occur."""
BEYOND, BEYOND_FREEDOM = 0.003, 3
"""Prior of the deviation of the log loss per octave beyond the runs of a table.

The first number is the deviation, and the second its weight as a number of measurements.
"""
SEARCHED_PER_OCTAVE = 2
"""Number of learning rates, and of batches, per octave in the user's search for the best run.

`Forecaster.best` gives intervals for the result of such a search.
"""
LEAST_SIZES = 3
"""Smallest number of values of an axis for fits without its largest or its smallest one."""
BEST_RUNS = 0.02
"""Largest excess of the log loss, over the best of its setting, with which a run counts as good.

`_prediction_errors` compares the law with good runs alone.
"""


@dataclasses.dataclass(frozen=True)
class Interval:
    """Median and 90 % interval of a predicted number."""

    low: float
    value: float
    high: float

    @classmethod
    def from_draws(cls, draws: np.ndarray) -> Interval:
        """Return the median and the 90 % interval of random draws [R] of a number."""
        low, value, high = np.quantile(draws, [LOW, 0.5, HIGH])
        return cls(float(low), float(value), float(high))

    @property
    def half_width(self) -> float:
        """Half of the interval's width, divided by the median."""
        return (self.high - self.low) / 2 / self.value


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Best learning rate and batch for a model size and number of tokens, with predicted loss.

    Attributes:
        peak_lr: Best peak learning rate at the best batch; `None` if it does not vary in the table.
        batch_sequences: Best batch in sequences; `None` if it does not vary in the table.
        loss: Loss of one run with this learning rate and batch.
    """

    peak_lr: Interval | None
    batch_sequences: Interval | None
    loss: Interval


@dataclasses.dataclass(frozen=True)
class NextRun:
    """Run that would narrow the interval of a forecast, if it were added to the table.

    Attributes:
        values: Number of each axis of the law: size, length, learning rate and batch.
        flops: Training FLOPs of the run, counted as 6 * parameters * tokens.
        half_width: Half-width of the interval of the best loss with this run, divided by the
            half-width without it.
    """

    values: Mapping[str, float]
    flops: float
    half_width: float


class Forecaster:
    """Forecasts of loss, best learning rate and batch from a fitted law, with 90 % intervals.

    Args:
        fit: Fitted law. The table of a law that was read from a file has only the smallest and
            largest value of each axis.
        beyond: Value of the property `beyond`, as a law from a file has it. By default it is
            measured from the runs of the table.
    """

    def __init__(self, fit: Fit, beyond: Mapping[str, tuple[float, int]] | None = None) -> None:
        self.fit = fit
        self._stored_beyond = beyond
        self._generator = np.random.default_rng(0)

    @classmethod
    def of_table(cls, table: RunTable, form: Form | None = None) -> Forecaster:
        """Fit a law to a table and return a forecaster of it.

        Args:
            form: Terms of the law, by default those of `form_of`.

        Raises:
            TableError: All runs have one size and length, or fewer than 3 neither diverged nor
                nearly did (see `fitted`).
        """
        return cls(fitted(table, form or form_of(table)))

    @functools.cached_property
    def beyond(self) -> Mapping[str, tuple[float, int]]:
        """Error that a forecast makes per octave outside of the table's range, by axis.

        It is a standard deviation of the log loss, with the degrees of freedom that it was
        estimated with. The keys are the axes of the law that are in `SETTING_AXES`.
        """
        if self._stored_beyond is not None:
            return self._stored_beyond
        axes = [axis for axis in self.fit.form.axes if axis in SETTING_AXES]
        deviations = {}
        for axis in axes:
            deviations[axis] = _deviation_per_octave(self.fit, axis)
        return deviations

    def distance(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return how many octaves a model and length lie outside of the table's range, by axis.

        The number is positive above and below the range, and 0 within it. Keys are those of
        `beyond`.

        Args:
            values: Number of at least each axis of `beyond`, by its name in `AXES`.
        """
        octaves = {}
        for axis in self.beyond:
            logs = np.log2(self.fit.table.values[axis])
            log = math.log2(values[axis])
            octaves[axis] = max(0.0, log - float(logs.max()), float(logs.min()) - log)
        return octaves

    def check(self, values: Mapping[str, float]) -> None:
        """Raise an error for a run that cannot be forecast from the table.

        Args:
            values: Numbers of a run by their names in `AXES`. Learning rate and batch may be left
                out.

        Raises:
            TableError: The table has no column for one of `values`, a size or length that the law
                needs is absent, or a number differs from the only one in the table by over 5 %.
        """
        table = self.fit.table
        for axis in values:
            if axis not in table.values:
                flag = axis.replace("_", "-")
                raise TableError(
                    f"{table.source} has no column {axis}, so nothing is said of it; leave "
                    f"--{flag} out, or name the column with --columns {axis}=COLUMN"
                )

        for axis in AXES:
            if axis not in table.values:
                continue
            if axis in self.fit.form.axes:
                if axis in SETTING_AXES and axis not in values:
                    raise TableError(
                        f"the run to forecast has no {axis}; write --{axis} N, such as 1.07e9 or 10b"
                    )
                continue
            # The axis does not vary, so the first run has the number of all runs.
            only = float(table.values[axis][0])
            if axis in values and not math.isclose(values[axis], only, rel_tol=0.05):
                raise TableError(
                    f"{table.source} says nothing of {axis} {_number_text(values[axis])}: all its "
                    f"runs have {_number_text(only)}; add runs of other values"
                )

    def loss_at(self, values: Mapping[str, float]) -> Interval:
        """Return the median and 90 % interval of the loss of one run.

        Args:
            values: Number of every axis of the law.
        """
        draws = self._draw(values)
        point = {}
        for axis in self.fit.form.axes:
            point[axis] = np.array([values[axis]])
        losses = self._draw_losses(values, point, draws)
        return Interval.from_draws(np.exp(losses[0]))

    def points(
        self, values: Mapping[str, float], points: Mapping[str, np.ndarray]
    ) -> list[Interval]:
        """Return the median and 90 % interval of the loss of each run of one size and length.

        Args:
            values: Number of each axis of the size and length, by its name in `AXES`.
            points: Numbers of the M runs, for every axis of the law [M].
        """
        losses = self._draw_losses(values, points, self._draw(values))
        return [Interval.from_draws(np.exp(row)) for row in losses]

    def lowest(self, values: Mapping[str, float], points: Mapping[str, np.ndarray]) -> Interval:
        """Return the median and 90 % interval of the lowest loss among several runs of a search.

        Because runs are noisy, the lowest loss is lower than that of a single run at the best
        learning rate and batch.

        Args:
            values: Number of each axis of the size and length, by its name in `AXES`.
            points: Numbers of the M runs of the search, for every axis of the law [M].
        """
        losses = self._draw_losses(values, points, self._draw(values))
        return Interval.from_draws(np.exp(losses.min(axis=0)))

    def best(self, values: Mapping[str, float]) -> Recommendation:
        """Return the best learning rate and batch for a size and length, and the loss with them.

        Learning rates and batches from the smallest to the largest of the table are compared.

        The intervals of learning rate and batch say where the best run of a search would be, in
        nine of ten cases. The search has two learning rates and two batches per octave. Its best
        run is random, because the law is uncertain and runs are noisy.

        Args:
            values: Number of each axis of the size and length, by its name in `AXES`.
        """
        grid = self.fit.grid(values)
        grid_losses, _ = self.fit.log_loss(grid)
        best = int(np.argmin(grid_losses))

        searched = self.fit.grid(values, SEARCHED_PER_OCTAVE)
        search_losses = self._draw_losses(values, searched, self._draw(values))
        best_runs = search_losses.argmin(axis=0)

        intervals: dict[str, Interval | None] = {}
        for axis in ("peak_lr", "batch_sequences"):
            if axis not in grid:
                intervals[axis] = None
                continue
            low, high = np.quantile(searched[axis][best_runs], [LOW, HIGH])
            value = float(grid[axis][best])
            # The value is from the finer grid, so it may be outside of the quantiles.
            intervals[axis] = Interval(min(float(low), value), value, max(float(high), value))

        best_values = {}
        for axis, column in grid.items():
            best_values[axis] = float(column[best])
        loss = self.loss_at(best_values)
        return Recommendation(intervals["peak_lr"], intervals["batch_sequences"], loss)

    def compute_optimal(self, flops: float) -> tuple[Interval, Interval, Recommendation]:
        """Return the best model size, tokens, learning rate and batch for a budget of FLOPs.

        FLOPs are counted as 6 * parameters * tokens. Sizes from 4 octaves below the smallest of the
        table to 6 octaves above the largest are compared, as far as the budget leaves a token for
        every 10 parameters.

        Raises:
            TableError: The law is not a function of both size and length, or the budget is too
                small for every size.
        """
        if not {"parameters", "tokens"} <= set(self.fit.form.axes):
            raise TableError(
                f"{self.fit.table.source} does not vary both parameters and tokens, so it cannot "
                "tell how to split --flops; write --parameters and --tokens, or add such runs"
            )
        logs = np.log2(self.fit.table.values["parameters"])
        sizes = 2.0 ** np.arange(logs.min() - 4, logs.max() + 6, 0.125)
        least = 6 * sizes[0] ** 2 / 10
        sizes = sizes[flops / (6 * sizes) >= sizes / 10]
        if not len(sizes):
            raise TableError(
                f"{flops:.3g} FLOPs are too few for {self.fit.table.source}: a sixteenth of its "
                f"smallest size with a token for every 10 parameters takes {least:.3g}"
            )

        # Best log loss of each size, and its derivatives by the numbers of the law.
        lowest = np.zeros(len(sizes))
        slopes = np.zeros((len(sizes), len(self.fit.numbers)))
        for index, size in enumerate(sizes):
            grid = self.fit.grid({"parameters": size, "tokens": flops / (6 * size)})
            losses, derivatives = self.fit.log_loss(grid)
            best = int(np.argmin(losses))
            lowest[index] = losses[best]
            slopes[index] = derivatives[best]

        drawn_losses = lowest[:, None] + slopes @ self._draw_numbers()
        drawn_sizes = sizes[drawn_losses.argmin(axis=0)]
        low, high = np.quantile(drawn_sizes, [LOW, HIGH])
        low_size = float(low)
        high_size = float(high)
        size = float(sizes[lowest.argmin()])
        tokens = flops / (6 * size)

        # The largest size leaves the fewest tokens.
        low_tokens = flops / (6 * high_size)
        high_tokens = flops / (6 * low_size)
        return (
            Interval(min(low_size, size), size, max(high_size, size)),
            Interval(min(low_tokens, tokens), tokens, max(high_tokens, tokens)),
            self.best({"parameters": size, "tokens": tokens}),
        )

    def next_runs(
        self, values: Mapping[str, float], share: float = 0.25, count: int = 3
    ) -> list[NextRun]:
        """Return the runs that would narrow the interval of a forecast's loss most, best first.

        Candidates are the sizes and lengths of the table, and doublings of the largest of them up
        to `values`, each with its best learning rate and batch. The narrowing is computed from the
        covariance of the fitted law and the noise of a run, without a new fit. The result is empty
        for a law that is not a function of both size and length, and if every candidate has more
        FLOPs than `share` allows.

        Args:
            values: Numbers of the size and length of the forecast.
            share: Largest FLOPs of a candidate, as a share of the FLOPs of the forecast.
            count: Largest number of runs to return, 3 by default.
        """
        if not {"parameters", "tokens"} <= set(self.fit.form.axes):
            return []
        noise = self.fit.noise
        covariance = self.fit.covariance
        goal = self._slopes_at_best(values)
        variance = float(goal @ covariance @ goal)
        noise_variance = noise.shared**2 + noise.near**2
        limit = 6 * values["parameters"] * values["tokens"] * share

        candidates: list[NextRun] = []
        for size in _candidates(self.fit.table.values["parameters"], values["parameters"]):
            for length in _candidates(self.fit.table.values["tokens"], values["tokens"]):
                flops = 6 * size * length
                if flops > limit:
                    continue
                grid = self.fit.grid({"parameters": size, "tokens": length})
                losses, derivatives = self.fit.log_loss(grid)
                best = int(np.argmin(losses))
                slopes = derivatives[best]

                # Variance of the goal given one noisy observation of the candidate.
                cross_covariance = float(goal @ covariance @ slopes)
                run_variance = float(slopes @ covariance @ slopes) + noise_variance
                variance_after = variance - cross_covariance**2 / run_variance
                narrowing = (variance_after + noise_variance) / (variance + noise_variance)
                run = {}
                for axis, column in grid.items():
                    run[axis] = float(column[best])
                candidates.append(NextRun(run, flops, math.sqrt(narrowing)))
        return sorted(candidates, key=lambda run: run.half_width)[:count]

    def prior_share(self, values: Mapping[str, float], axis: str) -> float:
        """Return how much of the prior's uncertainty about an axis is left after the fit, 0 to 1.

        A share near 1 means that the runs say little about the axis. The uncertainty is the
        standard deviation of the change of the best log loss when `axis` doubles. The share is this
        deviation for the fitted law, divided by that for the prior.

        Args:
            values: Number of each axis of the size and length, by its name in `AXES`.
            axis: Key of `values` whose number doubles.
        """
        doubled = {**values, axis: values[axis] * 2}
        change = self._slopes_at_best(doubled) - self._slopes_at_best(values)
        _, prior_deviations = self.fit.form.prior
        prior = float(np.sqrt(((change * prior_deviations) ** 2).sum()))
        return float(np.sqrt(change @ self.fit.covariance @ change)) / max(prior, 1e-12)

    def _slopes_at_best(self, values: Mapping[str, float]) -> np.ndarray:
        """Return the derivatives of a setting's lowest log loss by the numbers of the law [P].

        The lowest loss is that at the best learning rate and batch.
        """
        losses, slopes = self.fit.log_loss(self.fit.grid(values))
        return slopes[int(np.argmin(losses))]

    def _draw_numbers(self) -> np.ndarray:
        """Return R random draws of the law's P numbers, minus the fitted numbers [P, R]."""
        count = len(self.fit.numbers)
        # The small diagonal keeps a nearly singular covariance positive definite.
        root = np.linalg.cholesky(self.fit.covariance + 1e-12 * np.eye(count))
        return root @ self._generator.standard_normal((count, DRAWS))

    def _draw(self, values: Mapping[str, float]) -> _Draws:
        """Return random draws of the law's numbers and of the effect that a setting's runs share.

        The effect includes the error for each octave outside of the table's range. The generator is
        reset first, so that all settings get the same random numbers.
        """
        # Every setting gets the same draws, so that a forecast does not depend on earlier ones.
        self._generator = np.random.default_rng(0)
        numbers = self._draw_numbers()
        effect = self.fit.noise.shared * self._generator.standard_t(SHARED_FREEDOM, DRAWS)
        for axis, octaves in self.distance(values).items():
            deviation, freedom = self.beyond[axis]
            effect = effect + octaves * deviation * self._generator.standard_t(freedom, DRAWS)
        return _Draws(numbers, effect)

    def _draw_losses(
        self, values: Mapping[str, float], points: Mapping[str, np.ndarray], draws: _Draws
    ) -> np.ndarray:
        """Return draws of the log loss of runs of one setting, with the noise of each run [M, R].

        Args:
            values: Number of each axis of the size and length, by its name in `AXES`.
            points: Numbers of the M runs, for every axis of the law [M].
            draws: R draws for this setting, from `_draw`.
        """
        grid_losses, grid_slopes = self.fit.log_loss(self.fit.grid(values))
        point_losses, slopes = self.fit.log_loss(points)
        # To first order in the numbers, the lowest loss changes by the slopes at its present rate
        # and batch. That the best rate and batch move, too, is an effect of second order.
        best = int(np.argmin(grid_losses))
        lowest = grid_losses[best] + grid_slopes[best] @ draws.numbers
        losses = point_losses[:, None] + slopes @ draws.numbers
        deviation = self.fit.noise.of_run(losses - lowest)
        noise = self._generator.standard_t(RUN_FREEDOM, losses.shape)
        return losses + deviation * noise + draws.effect


@dataclasses.dataclass(frozen=True)
class _Draws:
    """R random draws of the unknowns of a forecast, other than the noise of each run.

    Attributes:
        numbers: Draws of the law's P numbers, minus the fitted numbers [P, R].
        effect: Draws of the effect on the log loss that the runs of a setting share [R].
    """

    numbers: np.ndarray
    effect: np.ndarray


def _deviation_per_octave(fit: Fit, axis: str) -> tuple[float, int]:
    """Measure the error of forecasts per octave outside of the table's range of an axis.

    A law is fitted without the largest value of the axis, and another without the smallest. The
    errors of their predictions for the runs left out are averaged with the prior `BEYOND`. The
    prior alone is returned for fewer than 3 distinct values, or if neither law can be fitted.

    Returns:
        Standard deviation of the log loss per octave, and its degrees of freedom.
    """
    logs = np.log2(fit.table.values[axis])
    distinct = np.unique(np.round(logs, 3))
    squares: list[float] = []
    if len(distinct) >= LEAST_SIZES:
        for end, neighbor in ((distinct[-1], distinct[-2]), (distinct[0], distinct[1])):
            retained = np.abs(logs - end) > 1e-2
            octaves = abs(float(end - neighbor))
            try:
                partial = fitted(fit.table.subset(retained))
            except TableError:
                # Too few runs are left, or all of them have one size and length.
                continue
            errors = _prediction_errors(partial, fit.table.subset(~retained))
            # The effect that a setting's runs share explains a part of the error.
            excess = float(np.mean(errors**2)) - partial.noise.shared**2
            # An error that noise alone explains counts as 0.
            squares.append(max(0.0, excess) / octaves**2)
    freedom = BEYOND_FREEDOM + len(squares)
    return math.sqrt((BEYOND_FREEDOM * BEYOND**2 + sum(squares)) / freedom), freedom


def _prediction_errors(fit: Fit, table: RunTable) -> np.ndarray:
    """Return the predicted minus the measured log loss for each setting of a table.

    A setting is all runs of one model and length. Its error is the median over the runs that are
    within 2 % of its best loss.
    """
    setting = settings_of(table)
    errors = []
    for index in range(setting.max() + 1):
        runs = table.subset(setting == index)
        near_best = runs.log_loss - runs.log_loss.min() < BEST_RUNS
        predicted, _ = fit.log_loss(runs.subset(near_best).values)
        errors.append(float(np.median(predicted - runs.log_loss[near_best])))
    return np.array(errors)


def _number_text(value: float) -> str:
    """Return a number of an axis as text for messages: from 10,000 on as a whole number."""
    return f"{value:,.0f}" if value >= 1e4 else f"{value:g}"


def _candidates(tried: np.ndarray, goal: float) -> list[float]:
    """Return the distinct values of an axis in the table, then doublings of the largest one.

    The doublings end at `goal`, with a tolerance of 1 %.

    Args:
        tried: Value of the axis for each run of the table [M].
        goal: Value of the axis for the forecast.
    """
    values = [float(value) for value in np.unique(tried)]
    value = values[-1]
    while value * 2 < goal * 1.01:
        value *= 2
        values.append(value)
    return values
