"""Simulation of transfer studies, to measure how often a verdict and an interval are right.

    python -m scripts.studies.verdicts [--studies 400] [--cells N] [--processes 2] [--render]

It writes docs/evidence/transfer/verdicts.json. Each simulated study is measured and judged by
`mupax.train.studies.transfer.study.measure`, as a real one: five rates and more until every
minimum lies inside, then 3 to 8 seeds until the verdict is decided. Only the losses are drawn: a
cell has the curvatures and the noise of a committed study, and the drift is known. Cells are
written as they finish, and an interrupted command resumes. `--render` prints the section of the
page without simulating.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from mupax import disk
from mupax.command_line import Switch
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, PresetConfig
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer import study as transfer
from mupax.train.studies.transfer.drift import Analysis, analyse
from mupax.train.studies.transfer.fit import STEP, Curve, projection
from scripts import ROOT, harness
from scripts.pages.markdown import table

OUT = ROOT / "docs" / "evidence" / "transfer" / "verdicts.json"
FOLDERS = ("transfer", "leaderboard")
"""Folders of docs/evidence with transfer studies."""
DRIFTS = (0.0, 0.22, 0.3, 0.5)
"""True drifts that are simulated, in octaves per doubling."""
SEEDS = (3, 5, 8)
"""Numbers of seeds at which coverage is measured; the first and last are the command's limits."""
SKEW = 0.3
"""Third derivative over twice the curvature, the median of the committed studies: losses are
steeper above the optimum."""
OPTIMUM = -6.25
"""log2 of the smallest size's best rate, which is drawn within a quarter octave of this."""
FIRST_SIZE = 16
"""Smallest head dimension of a simulated study, whose sizes double."""


@dataclass(frozen=True)
class Cell:
    """Noise of one committed study, with one value for each size in its tuples.

    Attributes:
        name: Names of the study's folder and preset.
        doublings: log2 of each size over the smallest.
        curvature: Coefficient of octaves squared in the loss around the optimum, in nats.
        single: Standard deviation of a run's loss around its seed's line over the rates, in nats.
        tilt: Standard deviation of a seed's slope that `single` does not explain, in nats per
            octave.
        level: Standard deviation of a seed's mean loss, in nats.
        skew: Third derivative over twice the curvature of the mean losses, within two octaves.
        scatter: Standard deviation of the best rate from one seed, in octaves.
        scattered: Covariance between sizes of the best rates from one seed, in octaves squared.
        freedom: Degrees of freedom of `scattered`: the number of seeds less one.
    """

    name: str
    doublings: tuple[float, ...]
    curvature: tuple[float, ...]
    single: tuple[float, ...]
    tilt: tuple[float, ...]
    level: tuple[float, ...]
    skew: float
    scatter: tuple[float, ...]
    scattered: tuple[tuple[float, ...], ...]
    freedom: int

    @property
    def weights(self) -> np.ndarray:
        """Weight of each size's best rate in the drift, the slope of a least-squares line."""
        centred = np.array(self.doublings) - np.mean(self.doublings)
        return centred / (centred @ centred)

    @property
    def noise(self) -> float:
        """Standard deviation of the drift from one seed, in octaves per doubling."""
        return math.sqrt(float((self.weights**2) @ (np.array(self.scatter) ** 2)))


def cells() -> list[Cell]:
    """Return one cell for each distinct committed study, the least noisy first."""
    by_points: dict[str, Cell] = {}
    paths: list[Path] = []
    for folder in FOLDERS:
        paths += (ROOT / "docs" / "evidence" / folder).glob("*/transfer.json")
    for path in sorted(paths):
        for study in json.loads(path.read_text())["studies"]:
            digest = _digest_of_points(study["sizes"])
            curves = [curve_of(size) for size in study["sizes"]]
            analysis = analyse([size["size"] for size in study["sizes"]], curves)
            num_fitted = sum(not fit.trouble for fit in analysis.fits)
            if digest not in by_points and num_fitted > 1 and analysis.seeds > 1:
                name = f"{path.parent.name}, {study['preset']}"
                by_points[digest] = _cell(name, analysis, curves)

    # Two presets that have the same rule for an axis were trained under two names. They are one
    # cell, under the first name.
    by_scatter: dict[tuple[float, ...], Cell] = {}
    for cell in reversed(by_points.values()):
        by_scatter[tuple(round(value, 3) for value in cell.scatter)] = cell
    return sorted(by_scatter.values(), key=lambda cell: cell.noise)


def _digest_of_points(sizes: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest that is equal for studies with the same trained points."""
    keys: set[str] = set()
    for size in sizes:
        keys |= {point["key"] for point in size["points"]}
    return hashlib.sha256("".join(sorted(keys)).encode()).hexdigest()


def curve_of(size: Mapping[str, Any]) -> Curve:
    """Return the losses of one size at the rates that were trained with all of its first seeds.

    The first seeds are those by which the rates were chosen.

    Args:
        size: entry of `sizes` in a transfer.json.
    """
    losses: dict[tuple[float, int], float] = {}
    for point in size["points"]:
        loss = math.inf if point["loss"] is None else point["loss"]
        losses[point["log2_lr"], point["seed"]] = loss
    first = size["rates_chosen_by_seeds"]
    seeds = sorted({seed for _, seed in losses})
    first_seeds = seeds[: min(first, _least_seeds(size))]

    rates = []
    for rate in sorted({rate for rate, _ in losses}):
        if all((rate, seed) in losses for seed in first_seeds):
            rates.append(rate)
    rows = []
    for rate in rates:
        rows.append([losses.get((rate, seed), math.nan) for seed in seeds])
    return Curve(np.array(rates), np.array(rows), first)


def _least_seeds(size: Mapping[str, Any]) -> int:
    """Return the number of seeds of the rate that has the fewest."""
    counts: dict[float, int] = {}
    for point in size["points"]:
        counts[point["log2_lr"]] = counts.get(point["log2_lr"], 0) + 1
    return min(counts.values())


def _cell(name: str, analysis: Analysis, curves: Sequence[Curve]) -> Cell:
    """Return the noise of one study, over its sizes with a fitted optimum."""
    seeds = analysis.seeds
    curvatures = []
    singles = []
    tilts = []
    levels = []
    skews = []
    optima = []
    fitted = [index for index, fit in enumerate(analysis.fits) if not fit.trouble]
    for index in fitted:
        curve = curves[index]
        fit = analysis.fits[index]
        x = np.asarray(fit.used)
        losses = curve.losses[np.isin(curve.x, fit.used), :seeds]
        _, slope_map, _ = projection(x, fit.optimum)

        # What is left of a seed's losses after the mean over seeds and a line over the rates.
        centred = losses - losses.mean(axis=1, keepdims=True)
        lines = np.stack([np.ones_like(x), x - x.mean()], axis=1)
        residual = centred - lines @ np.linalg.lstsq(lines, centred, rcond=None)[0]
        single = float((residual**2).sum()) / ((len(x) - 2) * (seeds - 1))

        slopes = slope_map @ centred
        # The noise of single runs makes slopes vary, too. Only the rest belongs to the seeds.
        tilt = float(slopes.var(ddof=1)) - single * float(slope_map @ slope_map)
        curvatures.append(fit.curvature)
        singles.append(math.sqrt(single))
        # The difference of two estimates may be negative.
        tilts.append(math.sqrt(max(0.0, tilt)))
        levels.append(float(centred.mean(axis=0).std(ddof=1)))
        optima.append(-slopes / (2 * fit.curvature))
        skews.append(_skew(curve, fit.optimum, fit.curvature))

    doublings = np.log2([analysis.sizes[index] / analysis.sizes[fitted[0]] for index in fitted])
    covariance = np.cov(np.array(optima))
    skew = math.nan
    if np.isfinite(skews).any():
        skew = float(np.nanmedian(skews))
    return Cell(
        name=name,
        doublings=tuple(doublings.tolist()),
        curvature=tuple(curvatures),
        single=tuple(singles),
        tilt=tuple(tilts),
        level=tuple(levels),
        skew=skew,
        scatter=tuple(np.sqrt(np.diag(covariance)).tolist()),
        scattered=tuple(tuple(row) for row in covariance.tolist()),
        freedom=seeds - 1,
    )


def _skew(curve: Curve, optimum: float, curvature: float) -> float:
    """Return the skew of the mean losses within 2.1 octaves, NaN with fewer than five rates."""
    octaves = curve.x - optimum
    # Four rates on either side, with room for rounding.
    near = np.isfinite(curve.mean) & (np.abs(octaves) <= 2.1)
    if near.sum() < 5:
        return math.nan
    cubic = np.polynomial.polynomial.polyfit(octaves[near], curve.mean[near], 3)[3]
    return float(3 * cubic / curvature)


# Simulated studies


class Simulated(transfer.Study):
    """Study that gives points in place of configs, because making configs takes the most time."""

    def config(self, point: transfer.Point) -> Config:
        """Return the point itself, which `Losses` reads instead of a config."""
        return cast("Config", point)


class Losses:
    """Replacement of the engine that draws losses around an optimum that drifts by a known amount.

    Args:
        cell: Cell that gives the curvature and noise of each size.
        drift: True drift, in octaves per doubling.
        trial: Seed of the study; equal seeds draw equal losses.
    """

    def __init__(self, cell: Cell, drift: float, trial: int) -> None:
        self._cell = cell
        self._trial = trial
        # The second number of a key keeps draws apart: 0 optimum, 1 seeds, 2 runs, 3 drift.
        start = OPTIMUM + np.random.default_rng([trial, 0]).uniform(-0.25, 0.25)
        self.optima = start + drift * np.array(cell.doublings)

    def __call__(self, configs: Sequence[Config]) -> list[Row]:
        """Return a row for each point, as the engine returns one for each config."""
        rows = []
        for point in cast("Sequence[transfer.Point]", configs):
            rows.append(Row("", "", self._loss(point), None, None, (), 1, 0.0, "in turn"))
        return rows

    def _loss(self, point: transfer.Point) -> float:
        index, rate, seed = point
        cell = self._cell
        octaves = rate * STEP - self.optima[index]
        seed_noise = np.random.default_rng([self._trial, 1, index, seed]).normal(size=2)
        # NumPy refuses negative keys, and a rate is a negative number of steps.
        run_key = [self._trial, 2, index, seed, int(rate) + 200]
        run_noise = np.random.default_rng(run_key).normal()

        of_seed = cell.level[index] * seed_noise[0] + cell.tilt[index] * seed_noise[1] * octaves
        # Any constant would do, because only differences of losses are judged.
        return (
            3
            + cell.curvature[index] * _bowl(octaves)
            + float(of_seed)
            + cell.single[index] * float(run_noise)
        )


def _bowl(octaves: float) -> float:
    """Return a convex function: `octaves**2` to second order, third derivative 2 SKEW at 0.

    Args:
        octaves: Distance of the rate from the optimum.
    """
    return 2 / SKEW**2 * (math.exp(SKEW * octaves) - SKEW * octaves - 1)


def studied(cell: Cell) -> transfer.Study:
    """Return the study that is simulated for a cell: as many sizes, each double the one before."""
    sizes = tuple(FIRST_SIZE * 2**index for index in range(len(cell.doublings)))
    study = transfer.plan(RECIPES["lm-tiny"](), "head_dim", sizes, PresetConfig(), "simulated")
    grown = tuple(round(FIRST_SIZE * 2**doubling) for doubling in cell.doublings)
    return Simulated(label=study.label, axis=study.axis, sizes=grown, configs=study.configs)


def outcomes(
    cell: Cell, drift: float | None, trials: int, seeds: int, max_seeds: int
) -> dict[str, float]:
    """Simulate studies, and return the shares of verdicts and of intervals that hold the truth.

    Args:
        drift: True drift of all studies; by default each study draws its own between -0.5 and 0.5.
        seeds: Number of seeds at every rate, before the verdict asks for more.
        max_seeds: Largest number of seeds near the minima.

    Returns:
        `transfers`, `drifts` and `undecided`: shares by verdict. `fitted`: share with a drift.
        `seeds`: mean number. `covered` and `price_covered`: shares of fitted studies whose interval
        holds the true drift, and the true price of not tuning the largest size.
    """
    study = studied(cell)
    counts = dict.fromkeys(
        ("transfers", "drifts", "undecided", "covered", "price_covered", "seeds", "fitted"), 0.0
    )
    for trial in range(trials):
        true_drift = drift
        if true_drift is None:
            true_drift = np.random.default_rng([trial, 3]).uniform(-0.5, 0.5)
        losses = Losses(cell, float(true_drift), trial)
        (measured,) = transfer.measure(
            [study], losses, seeds=seeds, max_seeds=max_seeds, minutes=math.inf
        )
        analysis = measured.analysis()
        if analysis is None:
            counts["undecided"] += 1
            continue
        counts[analysis.verdict] += 1
        counts["seeds"] += analysis.seeds
        if math.isfinite(analysis.drift.value):
            counts["fitted"] += 1
            counts["covered"] += analysis.drift.low <= true_drift <= analysis.drift.high
            counts["price_covered"] += _price_is_covered(cell, analysis, losses)

    shares = {}
    for name in ("transfers", "drifts", "undecided", "seeds", "fitted"):
        shares[name] = round(counts[name] / trials, 4)
    for name in ("covered", "price_covered"):
        shares[name] = round(counts[name] / max(1.0, counts["fitted"]), 4)
    return shares


def _price_is_covered(cell: Cell, analysis: Analysis, losses: Losses) -> bool:
    """Return whether the interval of the largest size's price holds the true price.

    The price is the loss at the smallest size's best rate less the loss at the own best rate. A
    price without a value counts as covered.
    """
    price = analysis.prices[-1]
    octaves = losses.optima[0] - losses.optima[-1]
    true_price = cell.curvature[-1] * _bowl(octaves)
    return not math.isfinite(price.value) or price.low - 1e-9 <= true_price <= price.high


def simulated(cell: Cell, trials: int) -> dict[str, Any]:
    """Simulate one cell at every drift and number of seeds, and return its entry of the record."""
    first = SEEDS[0]
    last = SEEDS[-1]
    verdicts = {}
    for drift in DRIFTS:
        verdicts[f"{drift:g}"] = outcomes(cell, drift, trials, first, last)
    coverage = {}
    for seeds in SEEDS:
        coverage[f"{seeds}"] = outcomes(cell, None, trials, seeds, seeds)
    return {
        **dataclasses.asdict(cell),
        "noise": cell.noise,
        "trials": trials,
        "verdicts": verdicts,
        "coverage": coverage,
    }


# The page's section


class Dependence(NamedTuple):
    """Dependence of a seed's best rates at two sizes."""

    correlation: float
    """Mean correlation over cells and pairs of sizes."""
    variance_ratio: float
    """Variance of the drift over its variance with independent sizes."""


def correlation(selected: Sequence[Cell]) -> Dependence:
    """Measure how a seed's best rates at two sizes depend on each other, averaged over cells."""
    products = []
    ratios = []
    weights = []
    for cell in selected:
        covariance = np.array(cell.scattered)
        deviations = np.sqrt(np.diag(covariance))
        # A size without scatter has no correlation with the others.
        if (deviations == 0).any():
            continue
        pairs = np.triu_indices(len(covariance), 1)
        products.append(float((covariance / np.outer(deviations, deviations))[pairs].mean()))
        ratios.append(float(cell.weights @ covariance @ cell.weights) / cell.noise**2)
        weights.append(cell.freedom)
    return Dependence(
        float(np.average(products, weights=weights)), float(np.average(ratios, weights=weights))
    )


SHARES = (
    ("0", "transfers"),
    ("0.22", "transfers"),
    ("0.22", "drifts"),
    ("0.3", "transfers"),
    ("0.5", "drifts"),
)
"""True drift and verdict of each column of the page's table."""


def document() -> str:
    """Return the section of docs/evidence/transfer.md on how often a verdict is right."""
    record = disk.read_json(OUT)
    selected = sorted(record["cells"], key=lambda cell: cell["noise"])
    rows = [
        ["study", "noise", *(f"{drift}: {verdict}" for drift, verdict in SHARES), "mean seeds at 0"]
    ]
    for cell in selected:
        by_drift = cell["verdicts"]
        name = cell["name"] if len(cell["name"]) < 40 else f"{cell['name'][:36]} ..."
        rows.append(
            [
                name,
                f"{cell['noise']:.2f}",
                *(f"{by_drift[drift][verdict]:.1%}" for drift, verdict in SHARES),
                f"{by_drift['0']['seeds']:.1f}",
            ]
        )

    coverage = [["seeds", "drift, all", "drift, lowest", "drift, highest", "price, all"]]
    for seeds in SEEDS:
        row = _coverage([cell["coverage"][f"{seeds}"] for cell in selected])
        coverage.append([str(seeds), *row])
    for drift in DRIFTS:
        row = _coverage([cell["verdicts"][f"{drift:g}"] for cell in selected])
        coverage.append([f"until decided, drift {drift:g}", *row])

    mean, _ = record["correlation"]
    return TEXT.format(
        trials=selected[0]["trials"],
        committed=record["committed"],
        verdicts=table(rows),
        coverage=table(coverage),
        correlation=f"{mean:+.2f}",
    )


def _coverage(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return cells of the table: coverage of all cells, of the worst, of the best, of prices."""
    weights = [row["fitted"] for row in rows]
    shares = [row["covered"] for row in rows]
    overall = float(np.average(shares, weights=weights))
    prices = float(np.average([row["price_covered"] for row in rows], weights=weights))
    return [f"{overall:.1%}", f"{min(shares):.1%}", f"{max(shares):.1%}", f"{prices:.1%}"]


TEXT = """## How far to trust a verdict

`python -m scripts.studies.verdicts` simulates studies with a known drift: {trials} for each drift and row of this table. A row takes its noise
and curvature from one of the {committed} studies that were recorded before the simulation. *Noise* is the standard deviation of the drift
from one seed, in octaves per doubling.

`mupax transfer` judges a simulated study after 3 seeds, and after each further one, up to 8, until decided.
Columns name a true drift and a verdict.

{verdicts}

At 0.22, both verdicts are right.

Shares of 95 % intervals that contain the true drift or price, over all rows or in one:

{coverage}

The intervals take a seed's best rates at two sizes as independent: their mean correlation is {correlation}.
"""


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    studies: int = 400
    """Number of simulated studies for each drift and cell."""
    processes: int = 1
    """Number of cells simulated at the same time."""
    cells: int | None = None
    """Number of cells, spread evenly over their noise; all by default."""
    render: Switch = False
    """Simulate nothing: print the section from the recorded cells."""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate the cells that are not recorded, write the record, print the section; return 0."""
    args = harness.parse(Options, argv)
    if not args.render:
        for count, record in enumerate(_records(args.studies, args.processes, args.cells)):
            disk.write_whole(OUT, json.dumps(record, indent=1) + "\n")
            path = OUT.relative_to(ROOT)
            print(f"{count + 1}: {len(record['cells'])} cells in {path}", flush=True)
    print(document())
    return 0


def _records(trials: int, processes: int, count: int | None) -> Iterator[dict[str, Any]]:
    """Yield the complete record, first with the recorded cells only, then after each new cell.

    Args:
        trials: Number of studies for each drift and cell. Cells of another number are simulated
            again.
        processes: Number of cells simulated at the same time.
        count: Number of cells; all by default.
    """
    committed = cells()
    dependence = correlation(committed)
    recorded = disk.read_json(OUT)["cells"] if OUT.exists() else []
    names = {cell.name for cell in committed}
    by_name = {}
    for cell in recorded:
        if cell["trials"] == trials and cell["name"] in names:
            by_name[cell["name"]] = cell

    def record() -> dict[str, Any]:
        return {
            "committed": len(committed),
            "correlation": [round(value, 4) for value in dependence],
            "cells": list(by_name.values()),
        }

    yield record()
    missing = []
    for cell in spread(committed)[:count]:
        if cell.name not in by_name:
            missing.append(cell)
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(simulated, cell, trials) for cell in missing]
        for future in concurrent.futures.as_completed(futures):
            cell = future.result()
            by_name[cell["name"]] = cell
            yield record()


def spread(sorted_cells: Sequence[Cell]) -> list[Cell]:
    """Return cells in an order in which any number of first cells is spread over the noise.

    The median comes first, then the quartiles, then the eighths.

    Args:
        sorted_cells: Cells in the order of their noise.
    """
    order: list[Cell] = []
    spans = [(0, len(sorted_cells))]
    while spans:
        low, high = spans.pop(0)
        if low < high:
            middle = (low + high) // 2
            order.append(sorted_cells[middle])
            spans += [(low, middle), (middle + 1, high)]
    return order


if __name__ == "__main__":
    raise SystemExit(main())
