"""The best rate of every size from few runs: what the smaller sizes say of a larger one's curve is used, and checked.

The smallest size, the cheapest, is searched as in any study: half octaves, all first seeds. It gives the curvature of the parabola
and the noise of a run beside its seed's. Every larger size has three rates an octave apart around the rate that the sizes before it
lead to, from one seed: the outer two decide the slope, from which with a known curvature the vertex follows. Its fit is least squares
of seed + parabola, with the smallest size's curvature (within a seventh) and the expected rate (within an octave) as normal priors;
where the vertex lies further off the three are moved. Where it is then known less well than to `ONE_SEED`, the three have a second
seed, which tells the size's own noise; where less well than to `TWO_SEEDS`, the size is searched in full as the smallest was. There is
no verdict on transfer, whose interval needs more seeds.

docs/evidence/frugal.json has a replay of it on the rows of the committed studies, which its numbers were chosen on.

The best rate of every size and how sure it is are shown on the terminal and written to frugal.json.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax import terminal
from mupax.train.studies.report import Report, Section, finite, write_json
from mupax.train.studies.sweep.grids import power
from mupax.train.studies.transfer import tuned
from mupax.train.studies.transfer.drift import analyse
from mupax.train.studies.transfer.fit import OCTAVE, SIDES, STEP, Curve, fit
from mupax.train.studies.transfer.study import MOST_RATES, Measured, Point
from mupax.zoo import families

ONE_SEED = 0.12
"""Standard deviation of a vertex, in octaves, up to which one seed at three rates is enough."""
TWO_SEEDS = 0.4
"""The same of two seeds; above it a size is searched in full."""
AGREE = 0.15
"""Relative standard deviation of the curvature from size to size."""
EXPECTED = 1.0
"""Standard deviation of a size's best rate around the expected one, in octaves."""
CONTINUED = 0.7
"""Share of the last drift that is expected again."""
REACH = 1.75
"""Where the weights (tricube) reach zero, in octaves."""
PRIOR_DEGREES = 4
"""Degrees of freedom that the smallest size's noise counts for."""
SMALLEST_NOISE = 1e-4
"""Nats."""


def report(
    folder: Path,
    measured: Sequence[Measured],
    about: dict[str, Any],
    save: str | None,
    label: str,
    command: str,
) -> int:
    """Print, write and save; 1 where a size has no best rate.

    Args:
        folder: for frugal.json.
        measured: studies that are over, frugal ones.
        about: what was trained, for the record.
        save: name of a tuned preset for the smallest size's rate.
        label: of the studies that it is of.
        command: that was written.
    """
    records = [_study(one) for one in measured if isinstance(one, Frugal)]
    path = write_json(folder / "frugal.json", {**about, "studies": records})
    remark = f"record in {path}; this search has no verdict on transfer, which --search grid gives"
    Report((), sections=[_section(study) for study in records], remarks=[remark]).show()
    if save:
        judged = [
            (one, analyse(one.study.sizes[:1], [one.curve(0)]))
            for one in measured
            if one.study.label == label
        ]
        written, use = tuned.save(save, label, judged[:1], command)
        terminal.say(tuned.saved_message(written, use))
    return int(any(size["log2_optimum"] is None for study in records for size in study["sizes"]))


def _study(one: Frugal) -> dict[str, Any]:
    study, (_, optima) = one.study, one.state()
    each = [families.train_flops(c.model) * c.steps * c.data.batch_size for c in study.configs]
    counts = [sum(at == i for i, _, _ in one.rows) for at in range(len(each))]
    sizes = [
        {
            "size": size, "log2_optimum": finite(optimum.value, 6), "deviation": finite(optimum.deviation, 6),
            "curvature": finite(optimum.curvature, 6), "in_full": optimum.full, "runs": count,
        }
        for size, optimum, count in zip(study.sizes, optima, counts, strict=False)
    ]  # fmt: skip
    return {
        "preset": study.label,
        "axis": study.axis,
        "stopped": one.stopped,
        "seeds": one.first,
        "cost": round(
            sum(n * cost for n, cost in zip(counts, each, strict=True))
            / (5 * one.first * sum(each)),
            4,
        ),
        "train_seconds": round(one.seconds, 1),
        "sizes": sizes,
    }


def _section(study: dict[str, Any]) -> Section:
    """Return the table of one study, with what it cost."""
    rows = [["size", "best rate", "log2", "known to", "runs"]]
    for size in study["sizes"]:
        log2 = size["log2_optimum"]
        rate = "none" if log2 is None else power(2.0**log2)
        numbers = [
            "unknown" if number is None else f"{number:.2f}" for number in (log2, size["deviation"])
        ]
        rows.append([str(size["size"]), rate, *numbers, str(size["runs"])])
    cost = f"{study['cost']:.2f} of the training of five rates with {study['seeds']} seeds at every size"
    return Section(
        rows, f"{study['preset']}, growing {study['axis']}: {study['stopped']}", [cost], left=()
    )


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A size's best rate.

    Attributes:
        value: log2 of it; nan where there is none.
        deviation: standard deviation, in octaves.
        curvature: loss per octave squared.
        noise: standard deviation of a loss beside its seed's.
        full: whether the size was searched in full.
    """

    value: float
    deviation: float
    curvature: float
    noise: float
    full: bool


@dataclasses.dataclass
class Frugal(Measured):
    """A study that asks for few runs.

    Attributes:
        grid: rates that may be trained, per size, in steps of `STEP` octaves; any unless given.
    """

    grid: tuple[Collection[int], ...] = ()

    def next_points(self, max_seeds: int, minutes: float) -> Sequence[Point]:
        missing, _ = self.state()
        if missing and self.seconds < 60 * minutes:
            return missing
        return self._stop(
            f"the {minutes:g} minutes ended" if missing else "every size has its best rate"
        )

    def state(self) -> tuple[list[Point], list[Optimum]]:
        """Points that are missing, and the best rates of the sizes that have theirs, the smallest first."""
        optima: list[Optimum] = []
        for at in range(len(self.study.sizes)):
            missing, optimum = self._size(at, optima)
            if optimum is None:
                return missing, optima
            optima.append(optimum)
        return [], optima

    def _size(self, at: int, before: Sequence[Optimum]) -> tuple[list[Point], Optimum | None]:
        if not at:
            return self._in_full(
                0, math.log2(self.study.configs[0].optimizer.peak_lr), None, math.nan
            )
        base = next((optimum for optimum in before if math.isfinite(optimum.value)), None)
        expected = before[-1].value
        if at > 1 and math.isfinite(before[-2].value):
            expected += CONTINUED * (before[-1].value - before[-2].value)
        if base is None or not math.isfinite(expected):
            start = math.log2(self.study.configs[0].optimizer.peak_lr)
            return self._in_full(at, start, None, math.nan)
        centre, optimum = self._nearest(at, expected), base
        for seeds, unsure in ((1, ONE_SEED), (2, TWO_SEEDS)):
            centres = set[int]()
            while centre not in centres:
                points: list[Point] = [
                    (at, rate, seed) for rate in self._three(at, centre) for seed in range(seeds)
                ]
                if missing := [point for point in points if point not in self.rows]:
                    return missing, None
                optimum, centres = self._vertex(at, base, expected), centres | {centre}
                moved = self._nearest(at, optimum.value)
                if abs(moved - centre) * STEP > STEP and moved not in centres:
                    centre = moved
            if optimum.deviation <= unsure:
                return [], optimum
        return self._in_full(at, optimum.value, base, expected)

    def _in_full(
        self, at: int, centre: float, base: Optimum | None, expected: float
    ) -> tuple[list[Point], Optimum | None]:
        """Half octaves around the best rate, which the first seed finds from the centre on, with all first seeds."""
        for seeds in (1, self.first):
            middle = self._nearest(at, centre)
            rates = {
                rate for rate in range(middle - SIDES, middle + SIDES + 1) if rate in self._grid(at)
            }
            if rates <= set(self.rates_with(at, seeds)):
                curve = self._curve(at, seeds)
                rates |= {
                    rate for x in curve.missing() if (rate := round(x / STEP)) in self._grid(at)
                }
                centre = float(curve.x[curve.best])
            points: list[Point] = [
                (at, rate, seed) for rate in sorted(rates) for seed in range(seeds)
            ]
            missing = [point for point in points if point not in self.rows]
            if missing and len(self.rates_with(at, seeds)) < MOST_RATES:
                return missing, None
        curve = self._curve(at, self.first)
        fitted = fit(curve, self.first)
        if not fitted.trouble:
            noise = _noise(
                curve.losses[curve.window(), : self.first], base.noise if base else math.nan
            )
            deviation = noise / (
                2 * fitted.curvature * math.sqrt(len(fitted.used) / 2 * self.first)
            )
            return [], Optimum(fitted.optimum, deviation, fitted.curvature, noise, True)
        if base is not None and math.isfinite(base.curvature):
            return [], dataclasses.replace(self._vertex(at, base, expected), full=True)
        return [], Optimum(math.nan, math.inf, math.nan, math.nan, True)

    def _vertex(self, at: int, base: Optimum, expected: float) -> Optimum:
        """The fit with priors, its weights centred at the vertex; see the module's text."""
        rows = [
            (rate * STEP, seed, self.rows[p].loss)
            for p in self.rows
            if p[0] == at
            for rate, seed in [p[1:]]
        ]
        x, seed, loss = (
            np.array([each for each in rows if math.isfinite(each[2])], float).reshape(-1, 3).T
        )
        seeds = np.unique(seed)
        rates = [r for r in np.unique(x) if (x == r).sum() == len(seeds)]
        own = np.array([[loss[(x == r) & (seed == s)][0] for s in seeds] for r in rates])
        noise = _noise(own.reshape(len(rates), len(seeds)), base.noise)
        vertex, deviation, curvature = expected, math.inf, base.curvature
        for _ in range(4 if len(x) else 0):
            centre = vertex
            u = x - centre
            weight = np.clip(1 - np.abs(u / REACH) ** 3, 0, None) ** 3 / noise**2
            design = np.column_stack([seed[:, None] == seeds, u, u**2]).astype(float)
            normal, right = design.T @ (design * weight[:, None]), design.T @ (weight * loss)
            slope = 2 * base.curvature  # of the curve an octave from its vertex
            normal[-2, -2] += (slope * EXPECTED) ** -2
            right[-2] -= (expected - centre) / (slope * EXPECTED**2)
            normal[-1, -1] += (AGREE * base.curvature) ** -2
            right[-1] += base.curvature / (AGREE * base.curvature) ** 2
            inverse = np.linalg.pinv(normal)
            *_, tilt, bend = inverse @ right
            curvature = max(float(bend), 0.3 * base.curvature)
            vertex = float(
                np.clip(centre - tilt / (2 * curvature), x.min() - OCTAVE, x.max() + OCTAVE)
            )
            deviation = math.sqrt(max(float(inverse[-2, -2]), 0.0)) / (2 * curvature)
            if abs(vertex - centre) < 0.05:
                break
        return Optimum(vertex, deviation, curvature, noise, False)

    def _curve(self, at: int, seeds: int) -> Curve:
        """Losses at the rates that have so many seeds."""
        rates = self.rates_with(at, seeds)
        losses = [[self.rows[at, rate, seed].loss for seed in range(seeds)] for rate in rates]
        return Curve(
            np.array(rates, float) * STEP, np.array(losses, float).reshape(len(rates), seeds), seeds
        )

    def _grid(self, at: int) -> Collection[int]:
        return self.grid[at] if self.grid else range(-100, 41)

    def _nearest(self, at: int, x: float) -> int:
        return min(self._grid(at), key=lambda rate: abs(rate * STEP - x))

    def _three(self, at: int, centre: int) -> list[int]:
        """The centre and the rates nearest to an octave from it on either side."""
        octave = round(OCTAVE / STEP)
        sides = [
            [rate for rate in self._grid(at) if (rate - centre) * side > 0] for side in (-1, 1)
        ]
        outer = [min(r, key=lambda x: abs(abs(x - centre) - octave)) for r in sides if r]
        return sorted([centre, *outer])


def _noise(losses: np.ndarray, before: float) -> float:
    """Standard deviation of losses [rates, seeds] beside effects of rate and seed, with what was known before as a prior."""
    losses = losses[np.isfinite(losses).all(axis=1)]
    freedom = max(losses.shape[0] - 1, 0) * max(losses.shape[1] - 1, 0)
    prior = PRIOR_DEGREES if math.isfinite(before) else 0
    if not freedom + prior:
        return SMALLEST_NOISE
    squares = prior * before**2 if prior else 0.0
    if freedom:
        rest = losses - losses.mean(axis=0) - losses.mean(axis=1, keepdims=True) + losses.mean()
        squares += float((rest**2).sum())
    return max(math.sqrt(squares / (freedom + prior)), SMALLEST_NOISE)
