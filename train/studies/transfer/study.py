"""Transfer study: one structure at growing sizes, the rates and seeds to train, and when to stop.

A study asks for points in rounds, each after the losses of the round before:

1. Five learning rates: at the smallest size around the recipe's, at every other size around the
   optimum of the size before. Rates are added until the best one has two on either side.
2. The two rates around the smallest size's optimum. Their losses give the price of not
   retuning.
3. Seeds, one at a time at the rates near each optimum, until the verdict on the drift is no longer
   `undecided`, or seeds or minutes end. If more seeds leave a size without a minimum, its rates are
   chosen anew from all of them.

All points see the same batches. Seed n initializes every size and rate alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mupax import presets
from mupax.terminal import counted
from mupax.train.config import joint
from mupax.train.config import sizes as sizes_of_models
from mupax.train.config.preset import PresetConfig, base_text, preset_of
from mupax.train.config.run import Config
from mupax.train.studies.sweep import grids
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer.drift import Analysis, analyse
from mupax.train.studies.transfer.fit import NOISE, SIDES, STEP, Curve, fit
from mupax.zoo.configs import ConfigError

MOST_RATES = 17
"""Number of rates at one size after which the search for its minimum ends."""
Runner = Callable[[Sequence[Config]], Sequence[Row]]
"""Function that trains runs and returns the result of each, a `Row`, in the same order.

In most cases it is `run` of a `Sweep`, which keeps the rows in a folder.
"""
Point = tuple[int, float, int]
"""One run of a study: (index of the size, rate in steps of `STEP` octaves, seed from 0).

The rate is log2 of the learning rate divided by `STEP`. In a study it is a whole number.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Plan of a transfer study: one preset, and a run at each size of one growing axis.

    Attributes:
        label: Name of the preset with its constants, for a person.
        axis: Size that grows: one of `mupax.train.config.sizes.AXES`, "batch" or "tokens".
        sizes: Values of the axis, increasing.
        configs: Run of each size. Points replace its learning rate and seed.
        trained: The same runs as they are trained, perhaps under another preset that gives the same
            numbers; `configs` by default.
    """

    label: str
    axis: str
    sizes: tuple[int, ...]
    configs: tuple[Config, ...]
    trained: tuple[Config, ...] = ()

    def config(self, point: Point) -> Config:
        """Return the complete config of a point: its size's run with the point's rate and seed.

        The run is that of `trained` if there is one. The batches are the same for all seeds.

        Args:
            point: Index of the size, rate in steps of `STEP` octaves, and seed, which is added to
                the run's own.
        """
        index, rate, seed = point
        config = (self.trained or self.configs)[index]
        return grids.point(config, 2.0 ** (rate * STEP), config.seed + seed)


def plan(
    config: Config, axis: str, sizes: Sequence[int], preset: PresetConfig, label: str
) -> Study:
    """Plan the study of a recipe's model under one preset and along one axis.

    The preset is relative to the smallest size unless it has a base.

    Args:
        config: Run of the recipe. Its preset is replaced by `preset`.
        axis: Size that grows, as in `Study`.
        sizes: Values of the axis, at least two, in any order.
        label: Name of the preset with its constants, for a person.

    Raises:
        ConfigError: Fewer than two sizes, or a size that the model cannot have.
        PresetError: The preset does not exist, has no such constant or no rule for the optimizer.
    """
    if len(sizes) < 2:
        raise ConfigError(
            f"--grow {axis}: a drift needs at least two sizes, as {axis}=16,32,64,128"
        )
    runs = []
    for size in sorted(sizes):
        runs.append(sizes_of_models.grown_run(config, axis, size))
    if preset.base is None and not presets.get(preset.name).baseless:
        preset = dataclasses.replace(preset, base=base_text(runs[0].model.base_sizes()))
    if preset.joint != "none":
        # The joint rule scales the warm-up, so all runs start from that of the smallest.
        preset = dataclasses.replace(preset, base=joint.base_beside(preset.base, runs[0]))
        runs = [dataclasses.replace(run, optimizer=runs[0].optimizer) for run in runs]
    configs = tuple(dataclasses.replace(run, preset=preset) for run in runs)
    for run in configs:
        # Both raise an error before anything is trained if the preset does not fit.
        preset_of(run).family(run.optimizer.name)
        _ = run.scaled_optimizer
    return Study(label=label, axis=axis, sizes=tuple(sorted(sizes)), configs=configs)


class _CachedCurve(NamedTuple):
    """Cached curve of one size, with the numbers that tell whether it is still valid.

    Attributes:
        num_rows: Number of rows of the study when the curve was made.
        first: Number of seeds by which the rates of the size were chosen.
        curve: Losses of the size over the learning rates.
    """

    num_rows: int
    first: int
    curve: Curve


class _CachedAnalysis(NamedTuple):
    """Cached analysis of a study, with the values that tell whether it is still valid.

    Attributes:
        num_rows: Number of rows of the study when the analysis was made.
        chosen: Copy of `Measured.chosen` at that time.
        analysis: Result of `Measured.analysis`.
    """

    num_rows: int
    chosen: dict[int, int]
    analysis: Analysis | None


@dataclasses.dataclass
class Measured:
    """Study in progress: its plan, the rows of trained points, and the choice of the next points.

    Attributes:
        study: Plan of the study.
        first: Number of seeds from which every rate is trained. Later seeds are trained only at the
            rates near each size's best one.
        rows: Result of every point that is trained.
        stopped: Reason why `next_points` returned no more points. Empty before.
        chosen: Number of seeds whose mean losses choose a size's rates, by the index of the size.
            Only sizes for which it is more than `first` have an entry.
    """

    study: Study
    first: int
    rows: dict[Point, Row] = dataclasses.field(default_factory=dict)
    stopped: str = ""
    chosen: dict[int, int] = dataclasses.field(default_factory=dict)
    _curves: dict[int, _CachedCurve] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    """Cached curves by index of the size. A round asks for each of them several times."""
    _analysed: _CachedAnalysis | None = dataclasses.field(default=None, init=False, repr=False)
    """Last analysis, cached. A round asks for it several times."""

    @property
    def seconds(self) -> float:
        """Training time of all points in `rows`, in seconds."""
        return sum(row.seconds for row in self.rows.values())

    def curve(self, index: int) -> Curve:
        """Return the losses of one size, at the rates that have rows of the first `first` seeds.

        Losses of later seeds are NaN where they are not trained. The curve is cached until there
        are new rows.

        Args:
            index: Index of the size in the study's `sizes`.
        """
        cached = self._curves.get(index)
        num_rows = len(self.rows)
        first = self._first(index)
        if cached is None or (cached.num_rows, cached.first) != (num_rows, first):
            cached = _CachedCurve(num_rows, first, self._curve_of(index))
            self._curves[index] = cached
        return cached.curve

    def _curve_of(self, index: int) -> Curve:
        """Return the losses of one size, NaN for seeds that are not trained."""
        # The most seeds of any size, so that seed n is the same column at all sizes.
        seeds = 1 + max((seed for _, _, seed in self.rows), default=-1)
        rates = self.rates_with(index, self.first)
        losses = np.full((len(rates), seeds), math.nan)
        for i, rate in enumerate(rates):
            for seed in range(seeds):
                row = self.rows.get((index, rate, seed))
                if row is not None:
                    losses[i, seed] = row.loss
        return Curve(np.array(rates, float) * STEP, losses, self._first(index))

    def rates_with(self, index: int, seeds: int) -> list[float]:
        """Return the rates of one size at which the first `seeds` seeds are trained, increasing.

        Rates are in steps of `STEP` octaves (`Point`).

        Args:
            index: Index of the size in the study's `sizes`.
        """
        tried = set()
        for size, rate, _ in self.rows:
            if size == index:
                tried.add(rate)
        rates = []
        for rate in sorted(tried):
            if all((index, rate, seed) in self.rows for seed in range(seeds)):
                rates.append(rate)
        return rates

    @property
    def curves(self) -> list[Curve]:
        """Losses of every size over the learning rates, in the order of the sizes."""
        return [self.curve(index) for index in range(len(self.study.sizes))]

    def analysis(self) -> Analysis | None:
        """Return the study's result so far: every size's best rate, their drift, and intervals.

        Return `None` while a size has no rate that is trained from all first seeds.
        """
        cached = self._analysed
        num_rows = len(self.rows)
        if cached is None or (cached.num_rows, cached.chosen) != (num_rows, self.chosen):
            curves = self.curves
            complete = all(len(curve.x) for curve in curves)
            analysis = analyse(self.study.sizes, curves) if complete else None
            # A copy, because `chosen` changes in place and would always equal itself.
            cached = _CachedAnalysis(num_rows, dict(self.chosen), analysis)
            self._analysed = cached
        return cached.analysis

    def next_points(self, max_seeds: int, minutes: float) -> Sequence[Point]:
        """Return the points to train next: missing rates first, then the points of one more seed.

        The result is empty if the study is over, and `stopped` is then set to the reason. The
        method may raise the number of seeds in `chosen` for a size without a minimum.

        Args:
            max_seeds: Most seeds at the rates near an optimum.
            minutes: Most minutes of training that the study may take.
        """
        points = self._rates()
        analysis = self.analysis() if not points else None
        if analysis is not None:
            # The first seeds may be so noisy that a size has no minimum at the rates that they
            # chose. All its seeds then choose the rates.
            for index, fitted in enumerate(analysis.fits):
                if fitted.trouble in NOISE and analysis.seeds > self._first(index):
                    self.chosen[index] = analysis.seeds
            points = self._rates()

        if not points:
            return self._seed(max_seeds, minutes)
        if self.seconds < 60 * minutes:
            return points
        return self._stop(
            f"the {minutes:g} minutes ended before every size had its minimum inside the grid"
        )

    def _stop(self, why: str) -> list[Point]:
        """Set `stopped` to the reason `why`, and return an empty list of points."""
        self.stopped = why
        return []

    def _first(self, index: int) -> int:
        """Return the number of seeds whose mean losses choose a size's rates."""
        return self.chosen.get(index, self.first)

    def _rates(self) -> Sequence[Point]:
        """Return the untrained points of the first size whose rates are not complete, or [].

        A size needs five rates around the best rate of the size before it, neighbours on both sides
        of its own best rate, and the two rates around the smallest size's optimum. The first size
        starts around the peak rate of its config. A size with `MOST_RATES` rates asks for no more
        neighbours, even if its best rate is at an end. Sizes in `chosen` also need their later
        seeds at the rates near their best.
        """
        # Rates here are in steps of `STEP` octaves.
        centre = round(math.log2(self.study.configs[0].optimizer.peak_lr) / STEP)
        transferred: float | None = None
        for index in range(len(self.study.sizes)):
            curve = self.curve(index)
            rates: list[int] = []
            # A curve that falls towards an end of the grid would ask for rates for ever.
            missing = curve.missing() if 0 < len(curve.x) < MOST_RATES else []
            if not len(curve.x):
                rates = list(range(centre - SIDES, centre + SIDES + 1))
            elif missing:
                rates = _in_steps(missing)
            else:
                # The next size is searched around the optimum of this one.
                fitted = fit(curve, self.first)
                if not fitted.trouble:
                    centre = round(fitted.optimum / STEP)
                elif np.isfinite(curve.mean).any():
                    centre = round(curve.x[int(np.argmin(curve.mean))] / STEP)
                if index == 0:
                    transferred = None if fitted.trouble else fitted.optimum / STEP
                elif transferred is not None:
                    # This size's loss at the smallest size's best rate gives the price of not
                    # retuning. That rate lies between two rates of the grid, so both are trained.
                    rates = [math.floor(transferred), math.ceil(transferred)]

            if index in self.chosen:
                # A window that moved may hold rates without the later seeds.
                rates += _in_steps(curve.x[curve.window()])
            points = self._untrained(index, rates, range(self._first(index)))
            if points:
                return points
        return []

    def _untrained(self, index: int, rates: Sequence[int], seeds: Sequence[int]) -> list[Point]:
        """Return the points of one size that have no row, rate by rate and without repeated rates.

        Args:
            rates: Rates in steps of `STEP` octaves.
        """
        points: list[Point] = []
        for rate in dict.fromkeys(rates):
            for seed in seeds:
                if (index, rate, seed) not in self.rows:
                    points.append((index, rate, seed))
        return points

    def seed_points(self, analysis: Analysis) -> list[Point]:
        """Return the points of one more seed, at the rates near every size's best one.

        Points that are trained already are left out.
        """
        points: list[Point] = []
        for index, curve in enumerate(self.curves):
            for rate in _in_steps(curve.x[curve.window()]):
                point = (index, rate, analysis.seeds)
                if point not in self.rows:
                    points.append(point)
        return points

    def seconds_of(self, points: Sequence[Point]) -> float:
        """Return the expected training time of points in seconds.

        A point is expected to take the mean time of the finished points of its size, or 0 if there
        are none.
        """
        seconds = 0.0
        for index in {point[0] for point in points}:
            durations = []
            for (size, _, _), row in self.rows.items():
                if size == index:
                    durations.append(row.seconds)
            count = sum(point[0] == index for point in points)
            seconds += count * sum(durations) / max(1, len(durations))
        return seconds

    def _seed(self, max_seeds: int, minutes: float) -> list[Point]:
        """Return the points of one more seed, or set `stopped` and return [] if the study ends.

        The study ends if the verdict is decided and no size is noisy, all `max_seeds` seeds are
        used, the minutes do not suffice for another seed, or fewer than two sizes can have a
        minimum. A noisy size has no minimum yet, but more seeds may give it one (`NOISE`).
        """
        analysis = self.analysis()
        if analysis is None:
            return self._stop("fewer than two sizes have a minimum; more seeds would not help")
        fitted = sum(not f.trouble for f in analysis.fits)
        noisy = sum(f.trouble in NOISE for f in analysis.fits)
        # A noisy size may still get a minimum by more seeds; any other trouble stays.
        if fitted + noisy < 2:
            return self._stop("fewer than two sizes have a minimum; more seeds would not help")
        if analysis.settled and not noisy:
            return self._stop("the verdict is decided")
        if analysis.seeds >= max_seeds:
            # An earlier command may have trained more than `max_seeds`.
            if analysis.seeds == 1:
                return self._stop("the only seed is used")
            return self._stop(f"all {analysis.seeds} seeds are used")
        points = self.seed_points(analysis)
        # Checked before a seed begins, because half a seed helps no interval.
        if self.seconds + self.seconds_of(points) > 60 * minutes:
            return self._stop(f"the {minutes:g} minutes would not hold another seed")
        return points

    def seeds_line(self, points: Sequence[Point], max_seeds: int, minutes: float) -> str:
        """Return a message on the next seed: why it is added, how many may follow, and the time.

        The line is "" if the points are not those of one more seed, but of missing rates.

        Args:
            points: Points to train next, as `next_points` returns them.
            max_seeds: Most seeds at the rates near an optimum.
            minutes: Most minutes of training that the study may take.
        """
        analysis = self.analysis()
        if analysis is None or {seed for _, _, seed in points} != {analysis.seeds}:
            return ""
        drift = analysis.drift
        shown = "no drift yet"
        if math.isfinite(drift.value):
            shown = f"drift {drift.value:+.2f}"
            if math.isfinite(drift.half_width):
                shown += f" [{drift.low:+.2f}, {drift.high:+.2f}]"
            shown += " octaves per doubling"
        state = "is decided by little"
        if analysis.verdict == "undecided":
            state = "is undecided"
        elif any(f.trouble for f in analysis.fits):
            state = "has a size without a minimum"

        seed_minutes = self.seconds_of(points) / 60
        left = max_seeds - analysis.seeds
        most_minutes = min(left * seed_minutes, minutes - self.seconds / 60)
        return (
            f"{self.study.label} in {self.study.axis} {state} "
            f"after {counted(analysis.seeds, 'seed')} "
            f"({shown}): at most {left} more, about {seed_minutes:.1f} "
            f"minutes of training each, {most_minutes:.1f} in all"
        )


def _in_steps(log2_rates: Iterable[float]) -> list[int]:
    """Return rates as whole numbers of `STEP` octaves, rounded.

    Args:
        log2_rates: log2 of the learning rates.
    """
    return [round(x / STEP) for x in log2_rates]


def measure(
    studies: Sequence[Study],
    run: Runner,
    tell: Callable[[str], None] | None = None,
    *,
    trained: Callable[[Sequence[Config]], bool] = lambda configs: False,
    seeds: int = 3,
    max_seeds: int = 8,
    minutes: float = 20.0,
    kind: type[Measured] = Measured,
) -> list[Measured]:
    """Train all points of studies, round by round, until no study asks for more points.

    The points of all studies go to `run` together in each round, so that points of one size may
    share a compiled program.

    Args:
        run: Function that trains points, or returns their rows if it has them from before.
        tell: Function that prints lines on the progress, called in every round. `None` (the
            default) prints nothing.
        trained: Function that returns whether `run` has the rows of all these points from before.
            Seeds that an earlier command trained at the rates of the fits are used even if fewer
            seeds decide.
        seeds: Number of seeds at every rate, 3 by default.
        max_seeds: Most seeds at the rates near an optimum, 8 by default.
        minutes: Most minutes of training per study. Training that was resumed counts, too.
        kind: `Measured` (the default) or a subclass, which decides which points to train.

    Returns:
        Finished studies with their rows, in the order of `studies`. `stopped` of each says why it
        ended.
    """
    all_measured = [kind(study, seeds) for study in studies]
    while requests := _requests(all_measured, max_seeds, minutes, run, trained):
        if tell is not None:
            _tell_round(tell, all_measured, requests, max_seeds, minutes)
        rows = run([measured.study.config(point) for measured, point in requests])
        for (measured, point), row in zip(requests, rows, strict=True):
            measured.rows[point] = row
    return all_measured


def _tell_round(
    tell: Callable[[str], None],
    studies: Sequence[Measured],
    requests: Sequence[tuple[Measured, Point]],
    max_seeds: int,
    minutes: float,
) -> None:
    """Call `tell` with a line on the rates and seeds to train next, and lines on added seeds.

    Args:
        requests: Pairs (study, point) of all points to train in the round.
    """
    groups: dict[str, list[Point]] = {}
    for measured, point in requests:
        name = f"{measured.study.label} {measured.study.axis} {measured.study.sizes[point[0]]}"
        groups.setdefault(name, []).append(point)
    parts = []
    for name, points in groups.items():
        rates = {rate for _, rate, _ in points}
        seeds = {seed for _, _, seed in points}
        parts.append(f"{name}: {counted(len(rates), 'rate')}, {counted(len(seeds), 'seed')}")
    tell("; ".join(parts))

    for measured in studies:
        points = []
        for study, point in requests:
            if study is measured:
                points.append(point)
        line = measured.seeds_line(points, max_seeds, minutes) if points else ""
        if line:
            tell(line)


def _requests(
    studies: Sequence[Measured],
    max_seeds: int,
    minutes: float,
    run: Runner,
    trained: Callable[[Sequence[Config]], bool],
) -> list[tuple[Measured, Point]]:
    """Return (study, point) for the points that all studies ask for next.

    Before a study of a grid ends, the rows of further seeds that an earlier command has trained are
    added to it. They may change its verdict. The arguments are those of `measure`.
    """
    requests: list[tuple[Measured, Point]] = []
    for measured in studies:
        points = measured.next_points(max_seeds, minutes)
        # Only a study of a grid adds seeds. More of them may change its verdict, and so its end.
        is_grid = type(measured) is Measured
        if not points and is_grid and _use_trained(measured, run, trained):
            points = measured.next_points(max_seeds, minutes)
        for point in points:
            requests.append((measured, point))
    return requests


def _use_trained(
    measured: Measured, run: Runner, trained: Callable[[Sequence[Config]], bool]
) -> bool:
    """Add to a study the rows of further seeds that an earlier command has trained.

    `run` and `trained` are those of `measure`.

    Returns:
        True if there were any such seeds.
    """
    added = False
    while analysis := measured.analysis():
        points = measured.seed_points(analysis)
        configs = [measured.study.config(point) for point in points]
        if not points or not trained(configs):
            break
        for point, row in zip(points, run(configs), strict=True):
            measured.rows[point] = row
        added = True
    return added
