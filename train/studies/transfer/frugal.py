"""Frugal search: the best learning rate of every size from few runs, without a verdict on transfer.

The smallest size is the cheapest and is searched as in any study: half octaves, all first seeds. It
gives the curvature of the parabola and the noise of a run, apart from the seed's effect.

A larger size has three rates, an octave apart, from one seed. They lie around the rate that the
sizes before it lead to. The outer two decide the slope, and with a known curvature the vertex
follows. The fit is least squares of seed + parabola. Normal priors are the smallest size's
curvature (within a seventh) and the expected rate (within an octave). If the vertex lies further
off, the three rates move.

If the vertex is known less well than to `ONE_SEED`, the three rates get a second seed, which shows
the size's own noise. If it is known less well than to `TWO_SEEDS`, the size is searched in full.

docs/evidence/frugal.json has a replay on the rows of the committed studies, on which the numbers
below were chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax import terminal
from mupax.terminal import counted
from mupax.train.studies.report import Report, Section, finite, write_json
from mupax.train.studies.sweep.grids import power
from mupax.train.studies.transfer import tuned
from mupax.train.studies.transfer.drift import analyse
from mupax.train.studies.transfer.fit import OCTAVE, SIDES, STEP, Curve, fit
from mupax.train.studies.transfer.study import MOST_RATES, Measured, Point
from mupax.zoo import families

ONE_SEED = 0.12
"""Standard deviation of a best rate from one seed above which a second is trained, in octaves."""
TWO_SEEDS = 0.4
"""Standard deviation of a best rate from two seeds above which more rates and seeds are trained.

It is in octaves. The size is then searched in full (`Frugal._in_full`).
"""
AGREE = 0.15
"""Relative standard deviation of the prior on a size's curvature, around a smaller size's one."""
EXPECTED = 1.0
"""Standard deviation of the prior on a size's best rate, around the expected rate, in octaves."""
CONTINUED = 0.7
"""Share of the last change of the best rate, in octaves, that is expected from size to size."""
REACH = 1.75
"""Distance from the vertex at which the tricube weights are zero, in octaves."""
PRIOR_DEGREES = 4
"""Degrees of freedom that a smaller size's noise counts for in the estimate of a size's noise."""
_ITERATIONS = 4
"""Greatest number of fits of a vertex, each with weights centred at the vertex before."""
_CLOSE = 0.05
"""Move of the vertex below which its fit ends, in octaves."""
SMALLEST_NOISE = 1e-4
"""Least standard deviation of a loss that `_noise` returns, in nats."""


def report(
    folder: Path,
    measured: Sequence[Measured],
    about: dict[str, Any],
    save: str | None,
    label: str,
    command: str,
) -> int:
    """Print the best rates of all sizes, write frugal.json, and save a tuned preset if asked.

    Return 1 if a size has no best rate, because its search found none or the time ended before,
    otherwise 0.

    Args:
        measured: Finished studies. Those that are not `Frugal` are left out of the record.
        about: Facts on what was trained, for the record.
        save: Name of a tuned preset for the smallest size's rate; `None` saves none.
        label: Label of the preset whose rate is saved.
        command: Command line that the tuned preset's file records.

    Raises:
        NoMinimum: `save` is given, but the smallest size has no best rate. frugal.json is written.
    """
    records = []
    for study in measured:
        if isinstance(study, Frugal):
            records.append(_record(study))
    path = write_json(folder / "frugal.json", {**about, "studies": records})
    remark = f"record in {path}; this search has no verdict on transfer, which --search grid gives"
    Report((), sections=[_section(record) for record in records], remarks=[remark]).show()

    if save:
        judged = []
        for study in measured:
            if study.study.label == label:
                if not study.curve(0).x.size:
                    # The time ended before the first seeds of the smallest size.
                    continue
                # A tuned preset holds the smallest size's rate, and this size alone is always
                # searched in full.
                smallest = analyse(study.study.sizes[:1], [study.curve(0)])
                judged.append((study, smallest))
        written, use = tuned.save(save, label, judged[:1], command, takes_rates=False)
        terminal.say(tuned.saved_message(written, use))

    for record in records:
        if any(size["log2_optimum"] is None for size in record["sizes"]):
            return 1
    return 0


def _record(measured: Frugal) -> dict[str, Any]:
    """Return a study as plain values for frugal.json.

    A size whose search did not end in time has null for its rate, and False as `reached`. `cost` is
    the study's training FLOPs divided by those of a grid of five rates with `first` seeds each at
    every size.
    """
    study = measured.study
    _, optima = measured.state()
    run_flops = []
    counts = []
    for index, config in enumerate(study.configs):
        flops = families.train_flops(config.model) * config.steps * config.data.batch_size
        run_flops.append(flops)
        counts.append(sum(point[0] == index for point in measured.rows))

    sizes = []
    for index, (size, count) in enumerate(zip(study.sizes, counts, strict=True)):
        reached = index < len(optima)
        optimum = Optimum(math.nan, math.inf, math.nan, math.nan, False)
        if reached:
            optimum = optima[index]
        sizes.append({
            "size": size,
            "reached": reached,
            "log2_optimum": finite(optimum.value, 6),
            "deviation": finite(optimum.deviation, 6),
            "curvature": finite(optimum.curvature, 6),
            "in_full": optimum.full,
            "runs": count,
        })  # fmt: skip
    trained_flops = sum(n * flops for n, flops in zip(counts, run_flops, strict=True))
    grid_flops = 5 * measured.first * sum(run_flops)
    return {
        "preset": study.label,
        "axis": study.axis,
        "stopped": measured.stopped,
        "seeds": measured.first,
        "cost": round(trained_flops / grid_flops, 4),
        "train_seconds": round(measured.seconds, 1),
        "sizes": sizes,
    }


def _section(record: dict[str, Any]) -> Section:
    """Return the table of one study's best rates, with the cost of its training below.

    Args:
        record: Study as plain values, from `_record`.
    """
    rows = [["size", "best rate", "log2", "known to", "runs"]]
    for size in record["sizes"]:
        log2 = size["log2_optimum"]
        rate = "none" if size["reached"] else "not reached"
        if log2 is not None:
            rate = power(2.0**log2)
        cells = [str(size["size"]), rate]
        for number in (log2, size["deviation"]):
            cells.append("unknown" if number is None else f"{number:.2f}")
        cells.append(str(size["runs"]))
        rows.append(cells)
    seeds = record["seeds"]
    cost = (
        f"{record['cost']:.2f} of the training of five "
        f"rates with {counted(seeds, 'seed')} at every size"
    )
    notes = [cost]
    if not all(size["reached"] for size in record["sizes"]):
        notes.append(
            "the same command with more --minutes reaches the other sizes; "
            "what is trained is used again"
        )
    title = f"{record['preset']}, growing {record['axis']}: {record['stopped']}"
    return Section(rows, title, notes, left=())


@dataclasses.dataclass(frozen=True)
class Optimum:
    """Best learning rate of one size.

    Attributes:
        value: log2 of the rate. NaN if there is none.
        deviation: Standard deviation of `value`, in octaves. inf if there is no rate.
        curvature: Loss per octave squared (half the second derivative).
        noise: Standard deviation of a loss in nats, apart from the effects of rate and seed.
        full: True if the size was searched on a grid of half octaves with all first seeds.
    """

    value: float
    deviation: float
    curvature: float
    noise: float
    full: bool


@dataclasses.dataclass
class Frugal(Measured):
    """Study that searches the best learning rate of every size with few runs.

    Attributes:
        grid: Learning rates that may be trained at each size. A whole number n stands for the rate
            2^(n * `STEP`). By default all rates from 2^-50 to 2^20 may be trained.
    """

    grid: tuple[Collection[int], ...] = ()

    def next_points(self, max_seeds: int, minutes: float) -> Sequence[Point]:
        missing, optima = self.state()
        if missing and self.seconds < 60 * minutes:
            return missing
        if missing:
            return self._stop(f"the {minutes:g} minutes ended")
        unknown = sum(not math.isfinite(optimum.value) for optimum in optima)
        if unknown:
            return self._stop(f"{unknown} of {len(optima)} sizes have no best rate")
        return self._stop("every size has its best rate")

    def state(self) -> tuple[list[Point], list[Optimum]]:
        """Return the points to train next, and the best rates that are known so far.

        The points are of the smallest size whose search is not finished. The best rates are those
        of all smaller sizes, the smallest first. If the search is over, there are no points, and
        every size has an entry, whose value is NaN if no rate was found.
        """
        optima: list[Optimum] = []
        for index in range(len(self.study.sizes)):
            missing, optimum = self._search(index, optima)
            if optimum is None:
                return missing, optima
            optima.append(optimum)
        return [], optima

    def _search(self, index: int, optima: Sequence[Optimum]) -> tuple[list[Point], Optimum | None]:
        """Return the points that one size still needs and `None`, or [] and its best rate.

        The smallest size is searched in full (`_in_full`). Others get three rates from one seed,
        then from two, and are searched in full if the best rate is still too uncertain.

        Args:
            index: Index of the size in the study's `sizes`.
            optima: Best rates of all smaller sizes, the smallest first.
        """
        start = math.log2(self.study.configs[0].optimizer.peak_lr)
        if index == 0:
            return self._in_full(index, start, None, math.nan)

        # The first size with a minimum: it has the most runs, hence the best curvature.
        base = next((optimum for optimum in optima if math.isfinite(optimum.value)), None)
        expected = optima[-1].value
        if index > 1 and math.isfinite(optima[-2].value):
            expected += CONTINUED * (optima[-1].value - optima[-2].value)
        if base is None or not math.isfinite(expected):
            return self._in_full(index, start, None, math.nan)

        centre = self._nearest(index, expected)
        optimum = base
        for seeds, most_deviation in ((1, ONE_SEED), (2, TWO_SEEDS)):
            centres: set[int] = set()
            # Centres that were tried end the loop, which might otherwise go back and forth.
            while centre not in centres:
                missing = self._untrained(index, self._three(index, centre), range(seeds))
                if missing:
                    return missing, None
                optimum = self._vertex(index, base, expected)
                centres.add(centre)
                moved = self._nearest(index, optimum.value)
                # The three rates move if the vertex is more than one step from their centre.
                if abs(moved - centre) * STEP > STEP and moved not in centres:
                    centre = moved
            if optimum.deviation <= most_deviation:
                return [], optimum
        return self._in_full(index, optimum.value, base, expected)

    def _in_full(
        self, index: int, centre: float, base: Optimum | None, expected: float
    ) -> tuple[list[Point], Optimum | None]:
        """Search one size on a grid of half octaves around its best rate, from `first` seeds.

        The first seed alone finds where the grid lies. Return the points that are still missing and
        `None`, or [] and the best rate. Without a minimum the rate is that of `_vertex`, or NaN if
        there is no `base`.

        Args:
            centre: Start of the search, log2 of the rate.
            base: Best rate of a smaller size, whose curvature helps if this size has no minimum.
            expected: Expected best rate, log2.
        """
        for seeds in (1, self.first):
            middle = self._nearest(index, centre)
            around = range(middle - SIDES, middle + SIDES + 1)
            rates = {rate for rate in around if rate in self._grid(index)}
            if rates <= set(self.rates_with(index, seeds)):
                curve = self._curve(index, seeds)
                for x in curve.missing():
                    rate = round(x / STEP)
                    if rate in self._grid(index):
                        rates.add(rate)
                centre = float(curve.x[curve.best])
            missing = self._untrained(index, sorted(rates), range(seeds))
            if missing and len(self.rates_with(index, seeds)) < MOST_RATES:
                return missing, None

        curve = self._curve(index, self.first)
        fitted = fit(curve, self.first)
        if not fitted.trouble:
            losses = curve.losses[curve.window(), : self.first]
            noise = _noise(losses, base.noise if base else math.nan)
            # Five rates half an octave apart, centred at the vertex, have squared distances that
            # sum to 2.5, half their number. `runs` is this sum over all seeds.
            runs = len(fitted.used) / 2 * self.first
            deviation = noise / (2 * fitted.curvature * math.sqrt(runs))
            return [], Optimum(fitted.optimum, deviation, fitted.curvature, noise, True)
        if base is not None and math.isfinite(base.curvature):
            return [], dataclasses.replace(self._vertex(index, base, expected), full=True)
        return [], Optimum(math.nan, math.inf, math.nan, math.nan, True)

    def _vertex(self, index: int, base: Optimum, expected: float) -> Optimum:
        """Return a size's best rate by a weighted least-squares parabola with normal priors.

        All finite losses of the size are used. Each seed has a free level of its own. Without a
        finite loss the rate is `expected` and its deviation infinite.

        Args:
            base: Best rate of a smaller size, whose curvature and noise are priors.
            expected: Expected best rate, log2.
        """
        points = []
        for (size, rate, seed), row in self.rows.items():
            if size == index and math.isfinite(row.loss):
                points.append((rate * STEP, seed, row.loss))
        x, seed, loss = np.array(points, float).reshape(-1, 3).T
        seeds = np.unique(seed)
        noise = _noise(_complete_losses(x, seed, loss), base.noise)

        vertex = expected
        deviation = math.inf
        curvature = base.curvature
        for _ in range(_ITERATIONS if len(x) else 0):
            centre = vertex
            u = x - centre
            weight = np.clip(1 - np.abs(u / REACH) ** 3, 0, None) ** 3 / noise**2
            # A level for every seed, because seeds differ more in level than in shape.
            design = np.column_stack([seed[:, None] == seeds, u, u**2]).astype(float)
            normal = design.T @ (design * weight[:, None])
            right = design.T @ (weight * loss)

            # Prior that the vertex is near the expected rate. `slope` is the slope of the loss an
            # octave from the vertex.
            slope = 2 * base.curvature
            normal[-2, -2] += (slope * EXPECTED) ** -2
            right[-2] -= (expected - centre) / (slope * EXPECTED**2)
            # Prior that the curvature is that of `base`, with a standard deviation of `AGREE` times
            # it.
            normal[-1, -1] += (AGREE * base.curvature) ** -2
            right[-1] += base.curvature / (AGREE * base.curvature) ** 2

            # A seed whose runs all have weight 0 makes the matrix singular.
            inverse = np.linalg.pinv(normal)
            *_, tilt, bend = inverse @ right
            # A floor, because the curvature of three noisy points may be negative, and the vertex
            # is divided by it.
            curvature = max(float(bend), 0.3 * base.curvature)
            moved = centre - tilt / (2 * curvature)
            # Farther out all tricube weights are 0, and the next fit would see no loss.
            vertex = float(np.clip(moved, x.min() - OCTAVE, x.max() + OCTAVE))
            deviation = math.sqrt(max(float(inverse[-2, -2]), 0.0)) / (2 * curvature)
            if abs(vertex - centre) < _CLOSE:
                break
        return Optimum(vertex, deviation, curvature, noise, False)

    def _curve(self, index: int, seeds: int) -> Curve:
        """Return the losses of one size as a curve over log2 of the learning rate.

        Args:
            seeds: Number of seeds. Only rates that were trained from all of the seeds 0 to
                `seeds` - 1 are in the curve, with the losses of these seeds.
        """
        rates = self.rates_with(index, seeds)
        losses = []
        for rate in rates:
            losses.append([self.rows[index, rate, seed].loss for seed in range(seeds)])
        table = np.array(losses, float).reshape(len(rates), seeds)
        return Curve(np.array(rates, float) * STEP, table, seeds)

    def _grid(self, index: int) -> Collection[int]:
        """Return the rates of a size that may be trained, in steps of `STEP` octaves.

        Without a `grid` these are 2^-50 to 2^20 in half octaves.
        """
        return self.grid[index] if self.grid else range(-100, 41)

    def _nearest(self, index: int, x: float) -> int:
        """Return the allowed rate nearest to `x`, in steps of `STEP` octaves.

        Args:
            x: log2 of a learning rate.
        """
        return min(self._grid(index), key=lambda rate: abs(rate * STEP - x))

    def _three(self, index: int, centre: int) -> list[int]:
        """Return the centre and, on each side, the allowed rate nearest to an octave from it.

        All are in steps of `STEP` octaves. A side without an allowed rate is left out.
        """
        octave = round(OCTAVE / STEP)
        rates = [centre]
        for side in (-1, 1):
            candidates = [rate for rate in self._grid(index) if (rate - centre) * side > 0]
            if candidates:
                rates.append(min(candidates, key=lambda rate: abs(abs(rate - centre) - octave)))
        return sorted(rates)


def _complete_losses(x: np.ndarray, seed: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Return the losses [rates, seeds] of the rates at which every seed has a loss.

    Args:
        x: log2 of the rate of every run, [n].
        seed: Seed of every run, [n].
        loss: Loss of every run, [n].
    """
    seeds = np.unique(seed)
    losses = []
    for rate in np.unique(x):
        if (x == rate).sum() == len(seeds):
            losses.append([loss[(x == rate) & (seed == s)][0] for s in seeds])
    return np.array(losses).reshape(len(losses), len(seeds))


def _noise(losses: np.ndarray, prior_noise: float) -> float:
    """Return the standard deviation of losses apart from effects of rate and seed, in nats.

    It is at least `SMALLEST_NOISE`.

    Args:
        losses: Losses [rates, seeds]. Rates at which a seed diverged are left out.
        prior_noise: Noise of a smaller size, used as a prior. NaN without one.
    """
    losses = losses[np.isfinite(losses).all(axis=1)]
    freedom = max(losses.shape[0] - 1, 0) * max(losses.shape[1] - 1, 0)
    has_prior = math.isfinite(prior_noise)
    prior_freedom = PRIOR_DEGREES if has_prior else 0
    if not freedom + prior_freedom:
        return SMALLEST_NOISE

    squares = prior_freedom * prior_noise**2 if has_prior else 0.0
    if freedom:
        # Residuals of rate + seed: both have effects, and what neither explains is noise.
        rest = losses - losses.mean(axis=0) - losses.mean(axis=1, keepdims=True) + losses.mean()
        squares += float((rest**2).sum())
    return max(math.sqrt(squares / (freedom + prior_freedom)), SMALLEST_NOISE)
