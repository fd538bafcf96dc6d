"""What a transfer study is: one structure at growing sizes, the rates and seeds to train at each, and when to stop.

A study asks for points in rounds, each after the losses of the one before. At the smallest size it starts from five
learning rates around the recipe's, at every other from five around the optimum of the size before, and adds rates until the
best has two on either side; then the two rates around the smallest size's optimum, whose loss is the price of not tuning;
then seeds, one at a time at the rates near each optimum, until the verdict on the drift is no longer `undecided`, or seeds or
minutes end. Where more seeds leave a size without a minimum, its rates are chosen anew from all of them.

All points see the same batches; seed n initializes every size and rate alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from mupax import presets
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
"""Rates at one size after which the search for its minimum ends."""
Runner = Callable[[Sequence[Config]], Sequence[Row]]
"""Trains points and returns their rows in the same order, such as `mupax.train.studies.sweep.sweep.run` in a folder."""
Point = tuple[int, float, int]
"""(index of the size, rate in steps of `STEP` octaves, whole in a study, seed from 0)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A preset and an axis.

    Attributes:
        label: the preset, for a person.
        axis: what grows, of `mupax.train.config.sizes`: `AXES`, batch or tokens.
        sizes: of it, increasing.
        configs: a run of each size, whose rate and seed the points replace.
        trained: the same runs as they are trained, under a preset that gives the same numbers; `configs` by default.
    """

    label: str
    axis: str
    sizes: tuple[int, ...]
    configs: tuple[Config, ...]
    trained: tuple[Config, ...] = ()

    def config(self, point: Point) -> Config:
        """The run of a point."""
        at, rate, seed = point
        config = (self.trained or self.configs)[at]
        return grids.point(config, 2.0 ** (rate * STEP), config.seed + seed)


def plan(
    config: Config, axis: str, sizes: Sequence[int], preset: PresetConfig, label: str
) -> Study:
    """A study of a recipe's model along one axis, its preset relative to the smallest size unless `preset` has a base.

    Args:
        config: the recipe's run.
        axis: what grows.
        sizes: of it.
        preset: under which.
        label: the preset, for a person.

    Raises:
        ConfigError: fewer than two sizes, or one that the model cannot have.
        PresetError: a preset that does not exist, takes no such constant or has no rule for the optimizer.
    """
    if len(sizes) < 2:
        raise ConfigError(
            f"--grow {axis}: a drift needs at least two sizes, as {axis}=16,32,64,128"
        )
    runs = [sizes_of_models.grown_run(config, axis, size) for size in sorted(sizes)]
    if preset.base is None and not presets.get(preset.name).baseless:
        preset = dataclasses.replace(preset, base=base_text(runs[0].model.base_sizes()))
    if preset.joint != "none":  # which scales warm-up itself
        preset = dataclasses.replace(preset, base=joint.base_beside(preset.base, runs[0]))
        runs = [dataclasses.replace(run, optimizer=runs[0].optimizer) for run in runs]
    configs = tuple(dataclasses.replace(run, preset=preset) for run in runs)
    for each in configs:
        preset_of(each).family(each.optimizer.name)  # refused here, if at all
        _ = each.scaled_optimizer
    return Study(label=label, axis=axis, sizes=tuple(sorted(sizes)), configs=configs)


@dataclasses.dataclass
class Measured:
    """A study and the rows it has so far.

    Attributes:
        study: what is measured.
        first: seeds at every rate.
        rows: of the points that are trained.
        stopped: why the study asks for no more; empty while it does.
        chosen: seeds by which a size's rates are chosen, where they are more than `first`.
    """

    study: Study
    first: int
    rows: dict[Point, Row] = dataclasses.field(default_factory=dict)
    stopped: str = ""
    chosen: dict[int, int] = dataclasses.field(default_factory=dict)
    _curves: dict[int, tuple[int, int, Curve]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    """Per size the number of all rows, the first seeds, and the curve of them: a round asks for curves several times."""
    _analysed: tuple[int, dict[int, int], Analysis | None] | None = dataclasses.field(
        default=None, init=False, repr=False
    )
    """Rows and chosen seeds of the last analysis, and that analysis: a round asks for it several times."""

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return sum(row.seconds for row in self.rows.values())

    def curve(self, at: int) -> Curve:
        """Return the losses of one size, at the rates that have their first seeds."""
        state = (len(self.rows), self._first(at))
        if at not in self._curves or self._curves[at][:2] != state:
            self._curves[at] = (*state, self._curve_of(at))
        return self._curves[at][2]

    def _curve_of(self, at: int) -> Curve:
        seeds = 1 + max((seed for _, _, seed in self.rows), default=-1)
        rates = self.rates_with(at, self.first)
        points = [[(at, r, s) for s in range(seeds)] for r in rates]
        losses = [
            [self.rows[point].loss if point in self.rows else math.nan for point in row]
            for row in points
        ]
        return Curve(
            np.array(rates, float) * STEP,
            np.array(losses, float).reshape(len(rates), seeds),
            self._first(at),
        )

    def rates_with(self, at: int, seeds: int) -> list[float]:
        """Return the rates of one size that are trained from each of the first seeds, increasing."""
        tried = {rate for index, rate, _ in self.rows if index == at}
        return sorted(
            rate for rate in tried if all((at, rate, seed) in self.rows for seed in range(seeds))
        )

    @property
    def curves(self) -> list[Curve]:
        """The curve of every size."""
        return [self.curve(at) for at in range(len(self.study.sizes))]

    def analysis(self) -> Analysis | None:
        """Return fits and intervals of the curves; None before every size has one."""
        if self._analysed is None or self._analysed[:2] != (len(self.rows), self.chosen):
            curves = self.curves
            complete = all(len(curve.x) for curve in curves)
            analysis = analyse(self.study.sizes, curves) if complete else None
            self._analysed = (len(self.rows), dict(self.chosen), analysis)
        return self._analysed[2]

    def next_points(self, max_seeds: int, minutes: float) -> Sequence[Point]:
        """Points to train next; none when the study is over, and then `stopped` says why.

        Args:
            max_seeds: most seeds at a rate.
            minutes: of training that the study may take.
        """
        points = self._rates()
        if not points and (analysis := self.analysis()):
            # Where noise leaves a size without a minimum its rates are chosen anew, by all its seeds.
            noisy = [at for at, fitted in enumerate(analysis.fits) if fitted.trouble in NOISE]
            self.chosen |= {at: analysis.seeds for at in noisy if analysis.seeds > self._first(at)}
            points = self._rates()
        if not points:
            return self._seed(max_seeds, minutes)
        if self.seconds < 60 * minutes:
            return points
        return self._stop(
            f"the {minutes:g} minutes ended before every size had its minimum inside the grid"
        )

    def _stop(self, why: str) -> list[Point]:
        self.stopped = why
        return []

    def _first(self, at: int) -> int:
        return self.chosen.get(at, self.first)

    def _rates(self) -> Sequence[Point]:
        """The missing rates of the first size that has not all it needs."""
        centre, transferred = round(math.log2(self.study.configs[0].optimizer.peak_lr) / STEP), None
        for at in range(len(self.study.sizes)):
            curve, rates = self.curve(at), []
            if not len(curve.x):
                rates = list(range(centre - SIDES, centre + SIDES + 1))
            elif len(curve.x) < MOST_RATES and (missing := curve.missing()):
                rates = [round(x / STEP) for x in missing]
            else:
                fitted = fit(curve, self.first)
                if not fitted.trouble:
                    centre = round(fitted.optimum / STEP)
                elif np.isfinite(curve.mean).any():
                    centre = round(curve.x[int(np.argmin(curve.mean))] / STEP)
                if at == 0:
                    transferred = None if fitted.trouble else fitted.optimum / STEP
                elif transferred is not None:
                    rates = [math.floor(transferred), math.ceil(transferred)]
            if at in self.chosen:
                rates += [round(x / STEP) for x in curve.x[curve.window()]]
            pairs = [
                (rate, seed) for rate in dict.fromkeys(rates) for seed in range(self._first(at))
            ]
            if points := [(at, *point) for point in pairs if (at, *point) not in self.rows]:
                return points
        return []

    def seed_points(self, analysis: Analysis) -> list[Point]:
        """Return the points of one more seed: the rates of every size's fit, without those that are trained."""
        points: list[Point] = []
        for index, curve in enumerate(self.curves):
            rates = [round(x / STEP) for x in curve.x[curve.window()]]
            candidates = [(index, rate, analysis.seeds) for rate in rates]
            points += [point for point in candidates if point not in self.rows]
        return points

    def seconds_of(self, points: Sequence[Point]) -> float:
        """Return the seconds that points will probably train, from those of their sizes so far."""
        seconds = 0.0
        for index in {point[0] for point in points}:
            own = [row.seconds for (size, _, _), row in self.rows.items() if size == index]
            count = sum(point[0] == index for point in points)
            seconds += count * sum(own) / max(1, len(own))
        return seconds

    def _seed(self, max_seeds: int, minutes: float) -> list[Point]:
        """Return one more seed's points, or stop and say why there are none."""
        analysis = self.analysis()
        noisy = [fitted.trouble in NOISE for fitted in analysis.fits] if analysis else []
        if analysis is None or sum(not f.trouble for f in analysis.fits) + sum(noisy) < 2:
            return self._stop("fewer than two sizes have a minimum; more seeds would not help")
        if analysis.settled and not any(noisy):
            return self._stop("the verdict is decided")
        if analysis.seeds >= max_seeds:
            return self._stop(f"all {max_seeds} seeds are used")
        points = self.seed_points(analysis)
        if self.seconds + self.seconds_of(points) > 60 * minutes:
            return self._stop(f"the {minutes:g} minutes would not hold another seed")
        return points

    def seeds_line(self, points: Sequence[Point], max_seeds: int, minutes: float) -> str:
        """Return a line on the seed that comes next: why, how many at most, and how long that takes at most.

        It is empty where the points are of rates that are still missing.
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
        state = "is undecided"
        if analysis.verdict != "undecided":
            state = (
                "has a size without a minimum"
                if any(f.trouble for f in analysis.fits)
                else "is decided by little"
            )
        own = self.seconds_of(points) / 60
        left = max_seeds - analysis.seeds
        most = min(left * own, minutes - self.seconds / 60)
        return (
            f"{self.study.label} in {self.study.axis} {state} after {analysis.seeds} seeds ({shown} octaves per doubling): "
            f"at most {left} more, about {own:.1f} minutes of training each, {most:.1f} in all"
        )


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
    """Train what the studies ask for until none asks for more.

    The studies' points go to `run` together, a round at a time, so that those of one size may share a program.

    Args:
        studies: to measure.
        run: trains points, or has their rows from before.
        tell: called with a line per round.
        trained: returns whether `run` has the rows of all these points from before. Seeds that an earlier command trained at
            the rates of the fits are used, even where fewer decide.
        seeds: at every rate.
        max_seeds: near the minima.
        minutes: of training, of one study; training that was resumed counts too.
        kind: what asks for points.
    """
    every = [kind(study, seeds) for study in studies]
    while requests := _requests(every, max_seeds, minutes, run, trained):
        if tell is not None:
            _tell_round(tell, every, requests, max_seeds, minutes)
        rows = run([measured.study.config(point) for measured, point in requests])
        for (measured, point), row in zip(requests, rows, strict=True):
            measured.rows[point] = row
    return every


def _tell_round(
    tell: Callable[[str], None],
    every: Sequence[Measured],
    requests: Sequence[tuple[Measured, Point]],
    max_seeds: int,
    minutes: float,
) -> None:
    """Say which rates and seeds are trained next, and how many seeds may follow."""
    groups: dict[str, list[Point]] = {}
    for measured, point in requests:
        name = f"{measured.study.label} {measured.study.axis} {measured.study.sizes[point[0]]}"
        groups.setdefault(name, []).append(point)
    counts = {
        name: [len(set(column)) for column in zip(*points, strict=True)]
        for name, points in groups.items()
    }
    tell(
        "; ".join(
            f"{name}: {rates} rates, {seeds} seeds" for name, (_, rates, seeds) in counts.items()
        )
    )
    for measured in every:
        own = [point for other, point in requests if other is measured]
        if own and (line := measured.seeds_line(own, max_seeds, minutes)):
            tell(line)


def _requests(
    every: Sequence[Measured],
    max_seeds: int,
    minutes: float,
    run: Runner,
    trained: Callable[[Sequence[Config]], bool],
) -> list[tuple[Measured, Point]]:
    """Return the points that all studies ask for next, after what is trained already is used."""
    requests: list[tuple[Measured, Point]] = []
    for measured in every:
        points = measured.next_points(max_seeds, minutes)
        # Only a grid's study adds seeds; with more of them its verdict, and so its end, may be another.
        if not points and type(measured) is Measured and _use_trained(measured, run, trained):
            points = measured.next_points(max_seeds, minutes)
        requests += [(measured, point) for point in points]
    return requests


def _use_trained(
    measured: Measured, run: Runner, trained: Callable[[Sequence[Config]], bool]
) -> bool:
    """Add the further seeds whose rows are all there, so that no measured seed is left out of the verdict.

    Returns:
        Whether there were any.
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
