"""What a law of a table says of runs that nobody has trained: best rate and batch, losses, each with an interval.

An interval has four parts: the Gaussian around the fit; what the runs of a new setting share (Student's t, as settings are few);
the noise of one run; and distance, which is what the law misses the largest size and the longest run by, for each octave, when it
is fitted without them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from mupax.train.studies.tables.law import AXES, Fit, Form, fitted, form_of, settings_of
from mupax.train.studies.tables.table import RunTable, TableError

DRAWS = 2000
LOW, HIGH = 0.05, 0.95
"""Quantiles of an interval: 90 %."""
SHARED_FREEDOM = 6
"""Degrees of freedom of Student's t for what a setting's runs share."""
RUN_FREEDOM = 4
"""The same of one run's noise: some runs are off by many deviations."""
BEYOND, BEYOND_FREEDOM = 0.003, 3
"""Deviation of the log loss for each octave beyond the runs, as if so many fits had shown it."""
SEARCHED_PER_OCTAVE = 2
"""Rates and batches an octave of the search whose best run an interval of rate and batch is for."""
LEAST_SIZES = 3
"""Values of an axis that a fit without the largest of them needs."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A number that is predicted: median and 90 % interval."""

    low: float
    value: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray) -> Interval:
        """Return the interval of many draws."""
        low, value, high = np.quantile(draws, [LOW, 0.5, HIGH])
        return cls(float(low), float(value), float(high))

    @property
    def half_width(self) -> float:
        """Half of the interval over its value."""
        return (self.high - self.low) / 2 / self.value


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Settings of the best run of a size and length.

    Attributes:
        peak_lr: best rate at the best batch; None where the table's rate does not vary.
        batch_sequences: best batch; None where the table's batch does not vary.
        loss: of one run there.
    """

    peak_lr: Interval | None
    batch_sequences: Interval | None
    loss: Interval


@dataclasses.dataclass(frozen=True)
class NextRun:
    """A run that would narrow the forecast.

    Attributes:
        values: its size, length, rate and batch.
        flops: it would take, 6 N D.
        half_width: of the interval of the best loss after it, over what it is now.
    """

    values: Mapping[str, float]
    flops: float
    half_width: float


class Forecaster:
    """Forecasts of a table's law.

    Args:
        fit: the law. Of one that was stored, the table has the ends of each axis alone.
        beyond: as the attribute `beyond`, of a law that was stored; measured from the table's runs unless given.
    """

    def __init__(self, fit: Fit, beyond: Mapping[str, tuple[float, int]] | None = None) -> None:
        self.fit = fit
        self._stored_beyond = beyond
        self._generator = np.random.default_rng(0)

    @classmethod
    def of_table(cls, table: RunTable, form: Form | None = None) -> Forecaster:
        """Return the forecasts of a table's law.

        Args:
            table: of runs.
            form: terms of the law; those that the table can say something about unless given.

        Raises:
            TableError: as `fitted`.
        """
        return cls(fitted(table, form or form_of(table)))

    @functools.cached_property
    def beyond(self) -> Mapping[str, tuple[float, int]]:
        """Deviation of the log loss for each octave beyond the runs, with its degrees of freedom, of each axis of the size."""
        if self._stored_beyond is not None:
            return self._stored_beyond
        return {
            axis: _beyond(self.fit, axis)
            for axis in self.fit.form.axes
            if axis in ("parameters", "tokens", "flops")
        }

    def distance(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the octaves of each axis of the size by which a setting is beyond the runs; 0 within them."""
        octaves = {}
        for axis in self.beyond:
            logs = np.log2(self.fit.table.values[axis])
            place = math.log2(values[axis])
            octaves[axis] = max(0.0, place - float(logs.max()), float(logs.min()) - place)
        return octaves

    def check(self, values: Mapping[str, float]) -> None:
        """Refuse a setting of which the table says nothing.

        Raises:
            TableError: an axis is not given, is no column of the table, or does not vary there and has another value.
        """
        for axis in values:
            if axis not in self.fit.table.values:
                flag = axis.replace("_", "-")
                raise TableError(
                    f"{self.fit.table.source} has no column {axis}, so nothing is said of it; leave --{flag} out, or name the column with "
                    f"--columns {axis}=COLUMN"
                )
        for axis in AXES:
            if axis not in self.fit.table.values:
                continue
            tried = self.fit.table.values[axis]
            if axis in self.fit.form.axes:
                if axis in ("parameters", "tokens", "flops") and axis not in values:
                    raise TableError(f"say of which {axis}: write --{axis} N, as 1.07e9 or 10b")
            elif axis in values and not math.isclose(values[axis], float(tried[0]), rel_tol=0.05):
                raise TableError(
                    f"{self.fit.table.source} says nothing of {axis} {_text(values[axis])}: all its runs have {_text(float(tried[0]))}; "
                    "add runs of other values"
                )

    def at(self, values: Mapping[str, float]) -> Interval:
        """Return the loss of one run.

        Args:
            values: of every axis of the law.
        """
        draws = self._draws(values)
        return Interval.of(
            np.exp(
                self._losses(
                    values, {axis: np.array([values[axis]]) for axis in self.fit.form.axes}, draws
                )[0]
            )
        )

    def points(
        self, values: Mapping[str, float], points: Mapping[str, np.ndarray]
    ) -> list[Interval]:
        """Return the losses of single runs of one size and length.

        Args:
            values: size and length.
            points: rates and batches [M], of every axis of the law.
        """
        losses = self._losses(values, points, self._draws(values))
        return [Interval.of(np.exp(row)) for row in losses]

    def lowest(self, values: Mapping[str, float], points: Mapping[str, np.ndarray]) -> Interval:
        """Return the lowest loss of a search, which noise makes lower than the loss at the best rate and batch.

        Args:
            values: size and length.
            points: rates and batches that are tried [M].
        """
        draws = self._draws(values)
        return Interval.of(np.exp(self._losses(values, points, draws).min(axis=0)))

    def best(self, values: Mapping[str, float]) -> Recommendation:
        """Return the best rate and batch of a size and length, within the rates and batches of the table.

        Their intervals hold nine in ten of the best runs of a search with two rates and two batches an octave: its noise counts.
        """
        grid = self.fit.grid(values)
        center, _ = self.fit.log_loss(grid)
        place = int(np.argmin(center))
        searched = self.fit.grid(values, SEARCHED_PER_OCTAVE)
        chosen = self._losses(values, searched, self._draws(values)).argmin(axis=0)
        intervals: dict[str, Interval | None] = {}
        for axis in ("peak_lr", "batch_sequences"):
            if axis not in grid:
                intervals[axis] = None
                continue
            low, high = np.quantile(searched[axis][chosen], [LOW, HIGH])
            value = float(grid[axis][place])
            intervals[axis] = Interval(min(float(low), value), value, max(float(high), value))
        loss = self.at({axis: float(column[place]) for axis, column in grid.items()})
        return Recommendation(intervals["peak_lr"], intervals["batch_sequences"], loss)

    def compute_optimal(self, flops: float) -> tuple[Interval, Interval, Recommendation]:
        """Return size, tokens and settings of the lowest loss for so many training FLOPs, 6 N D.

        Raises:
            TableError: the law is not of both size and length.
        """
        if not {"parameters", "tokens"} <= set(self.fit.form.axes):
            raise TableError(
                f"{self.fit.table.source} does not vary both parameters and tokens, so nothing is said of the best of both"
            )
        logs = np.log2(self.fit.table.values["parameters"])
        sizes = 2.0 ** np.arange(logs.min() - 4, logs.max() + 6, 0.125)
        # Sizes that would see fewer tokens than a tenth of their parameters are no sensible runs.
        sizes = sizes[flops / (6 * sizes) >= sizes / 10]
        centers = np.zeros(len(sizes))
        slopes = np.zeros((len(sizes), len(self.fit.numbers)))
        for index, size in enumerate(sizes):
            grid = self.fit.grid({"parameters": size, "tokens": flops / (6 * size)})
            losses, derivatives = self.fit.log_loss(grid)
            place = int(np.argmin(losses))
            centers[index] = losses[place]
            slopes[index] = derivatives[place]
        drawn = centers[:, None] + slopes @ self._numbers()
        best = sizes[drawn.argmin(axis=0)]
        size = float(sizes[centers.argmin()])
        low, high = (float(end) for end in np.quantile(best, [LOW, HIGH]))
        tokens = flops / (6 * size)
        return (
            Interval(min(low, size), size, max(high, size)),
            Interval(min(flops / (6 * high), tokens), tokens, max(flops / (6 * low), tokens)),
            self.best({"parameters": size, "tokens": tokens}),
        )

    def next_runs(
        self, values: Mapping[str, float], share: float = 0.25, count: int = 3
    ) -> list[NextRun]:
        """Return the runs that would narrow the interval of the best loss most.

        Candidates are the table's own sizes and lengths and those between and beyond them, up to the setting's, each at its best
        rate and batch. What a run narrows follows from the Gaussian around the fit alone.

        Args:
            values: size and length of the forecast.
            share: of the setting's FLOPs that a candidate may take.
            count: of runs that are returned.
        """
        if not {"parameters", "tokens"} <= set(self.fit.form.axes):
            return []
        goal = self._slopes_at_best(values)
        noise = self.fit.noise
        variance = float(goal @ self.fit.covariance @ goal)
        rest = noise.shared**2 + noise.near**2
        limit = 6 * values["parameters"] * values["tokens"] * share
        candidates: list[NextRun] = []
        for size in _candidates(self.fit.table.values["parameters"], values["parameters"]):
            for length in _candidates(self.fit.table.values["tokens"], values["tokens"]):
                flops = 6 * size * length
                if flops > limit:
                    continue
                place = {"parameters": size, "tokens": length}
                grid = self.fit.grid(place)
                losses, derivatives = self.fit.log_loss(grid)
                best = int(np.argmin(losses))
                slopes = derivatives[best]
                carried = float(goal @ self.fit.covariance @ slopes)
                total = float(slopes @ self.fit.covariance @ slopes) + rest
                # Variance of a Gaussian after it is conditioned on one more observation.
                left = variance - carried**2 / total
                named = {axis: float(column[best]) for axis, column in grid.items()}
                candidates.append(
                    NextRun(named, flops, math.sqrt((left + rest) / (variance + rest)))
                )
        return sorted(candidates, key=lambda run: run.half_width)[:count]

    def prior_share(self, values: Mapping[str, float], axis: str) -> float:
        """Return how uncertain the law is of what twice an axis does to the best loss, over what it is without any run."""
        twice = {**values, axis: values[axis] * 2}
        change = self._slopes_at_best(twice) - self._slopes_at_best(values)
        _, deviation = self.fit.form.prior
        before = float(np.sqrt(((change * deviation) ** 2).sum()))
        return float(np.sqrt(change @ self.fit.covariance @ change)) / max(before, 1e-12)

    def _slopes_at_best(self, values: Mapping[str, float]) -> np.ndarray:
        """Return the derivatives of a setting's best log loss by the numbers of the law [P]."""
        losses, slopes = self.fit.log_loss(self.fit.grid(values))
        return slopes[int(np.argmin(losses))]

    def _numbers(self) -> np.ndarray:
        """Return draws of the law's numbers, around the fitted ones [P, R]."""
        # 1e-12 keeps a covariance that rounding made singular positive definite.
        root = np.linalg.cholesky(self.fit.covariance + 1e-12 * np.eye(len(self.fit.numbers)))
        return root @ self._generator.standard_normal((len(self.fit.numbers), DRAWS))

    def _draws(self, values: Mapping[str, float]) -> _Draws:
        """Return draws of the law and of a new setting's effect."""
        self._generator = np.random.default_rng(
            0
        )  # the same draws for every setting, so that an answer does not depend on others
        numbers = self._numbers()
        effect = self.fit.noise.shared * self._generator.standard_t(SHARED_FREEDOM, DRAWS)
        for axis, octaves in self.distance(values).items():
            deviation, freedom = self.beyond[axis]
            effect = effect + octaves * deviation * self._generator.standard_t(freedom, DRAWS)
        return _Draws(numbers, effect)

    def _losses(
        self, values: Mapping[str, float], points: Mapping[str, np.ndarray], draws: _Draws
    ) -> np.ndarray:
        """Return draws of the log loss of runs of one setting, with their noise [M, R]."""
        grid, grid_slopes = self.fit.log_loss(self.fit.grid(values))
        center, slopes = self.fit.log_loss(points)
        # The best of the grid, to first order: the minimum moves with the numbers, its place does not.
        place = int(np.argmin(grid))
        lowest = grid[place] + grid_slopes[place] @ draws.numbers
        losses = center[:, None] + slopes @ draws.numbers
        deviation = self.fit.noise.of_run(losses - lowest)
        noise = self._generator.standard_t(RUN_FREEDOM, losses.shape)
        return losses + deviation * noise + draws.effect


@dataclasses.dataclass(frozen=True)
class _Draws:
    """Draws of what a forecast does not know: numbers of the law [P, R], and what a setting's runs share [R]."""

    numbers: np.ndarray
    effect: np.ndarray


def _beyond(fit: Fit, axis: str) -> tuple[float, int]:
    """Return what an octave beyond the runs adds, from fits without the largest and the smallest values of an axis."""
    logs = np.log2(fit.table.values[axis])
    distinct = np.unique(np.round(logs, 3))
    squares: list[float] = []
    if len(distinct) >= LEAST_SIZES:
        for end, neighbor in ((distinct[-1], distinct[-2]), (distinct[0], distinct[1])):
            without = np.abs(logs - end) > 1e-2
            octaves = abs(float(end - neighbor))
            try:
                partial = fitted(fit.table.subset(without))
            except TableError:
                continue
            missed = _missed(partial, fit.table.subset(~without))
            excess = float(np.mean(missed**2)) - partial.noise.shared**2
            squares.append(max(0.0, excess) / octaves**2)
    freedom = BEYOND_FREEDOM + len(squares)
    return math.sqrt((BEYOND_FREEDOM * BEYOND**2 + sum(squares)) / freedom), freedom


def _missed(fit: Fit, table: RunTable) -> np.ndarray:
    """Return what a law misses each setting of other runs by, as a median over its better runs [K]."""
    setting = settings_of(table)
    missed = []
    for index in range(setting.max() + 1):
        runs = table.subset(setting == index)
        near = runs.log_loss - runs.log_loss.min() < 0.02
        predicted, _ = fit.log_loss(runs.subset(near).values)
        missed.append(float(np.median(predicted - runs.log_loss[near])))
    return np.array(missed)


def _text(value: float) -> str:
    """Return a value of an axis for a person."""
    return f"{value:,.0f}" if value >= 1e4 else f"{value:g}"


def _candidates(tried: np.ndarray, goal: float) -> list[float]:
    """Return values of an axis for a next run: the table's, and those an octave apart up to the goal."""
    values = [float(value) for value in np.unique(tried)]
    value = values[-1]
    # 1.01, so that a goal of a whole number of octaves is reached despite rounding.
    while value * 2 < goal * 1.01:
        value *= 2
        values.append(value)
    return values
