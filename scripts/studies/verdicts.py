"""Simulated transfer studies at the noise of the committed ones: writes docs/evidence/transfer/verdicts.json, and shows it.

    python -m scripts.studies.verdicts [--studies 400] [--cells N] [--processes 2] [--render]

Each simulated study is measured and judged by `mupax.train.studies.transfer.study.measure`, as a command's is: five rates and
more until every minimum lies inside, then seeds until the verdict is decided, 3 to 8. Only the losses are made up, from the
curvatures and the noise of a committed study (a cell), with a drift that is known. Every cell is written as it finishes, and a
stopped command goes on. `--render` prints the tables of docs/evidence/transfer.md from what is there.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
DRIFTS = (0.0, 0.22, 0.3, 0.5)
"""True drifts whose verdicts are counted, in octaves per doubling."""
SEEDS = (3, 5, 8)
"""Fixed numbers of seeds whose coverage is counted; the first and the last are the command's default limits."""
SKEW = 0.3
"""Third derivative over twice the curvature: losses are steeper above the optimum. The median of the committed studies."""
OPTIMUM = -6.25
"""log2 of the smallest size's best rate, within a quarter octave."""
FIRST_SIZE = 16
"""Head dimension that stands for the smallest size; the others double."""


@dataclass(frozen=True)
class Cell:
    """The noise of one committed study, per size.

    Attributes:
        name: folder and preset.
        doublings: log2 of the sizes over the smallest.
        curvature: nats per octave squared.
        single: standard deviation of a run's loss beside its seed's level and slope, in nats.
        tilt: standard deviation of a seed's slope beyond what `single` explains, in nats per octave.
        level: standard deviation of a seed's level, in nats.
        skew: of the mean losses within two octaves.
        scatter: standard deviation of the optima of one seed, in octaves, size by size.
        scattered: covariance of the optima of one seed between sizes.
        freedom: degrees of freedom of `scattered`, the seeds less one.
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
        """Weights of the optima in the drift."""
        centred = np.array(self.doublings) - np.mean(self.doublings)
        return centred / (centred @ centred)

    @property
    def noise(self) -> float:
        """Standard deviation of the drift from one seed, in octaves per doubling."""
        return math.sqrt(float((self.weights**2) @ (np.array(self.scatter) ** 2)))


def cells() -> list[Cell]:
    """Return the cells of all committed studies, the least noisy first; of studies with the same points one."""
    selected: dict[str, Cell] = {}
    paths = sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / "docs" / "evidence" / folder).glob("*/transfer.json")
    )
    for path in paths:
        for study in json.loads(path.read_text())["studies"]:
            keys = sorted({point["key"] for size in study["sizes"] for point in size["points"]})
            digest = hashlib.sha256("".join(keys).encode()).hexdigest()
            curves = [curve_of(size) for size in study["sizes"]]
            analysis = analyse([size["size"] for size in study["sizes"]], curves)
            fitted = sum(not fit.trouble for fit in analysis.fits)
            if digest not in selected and fitted > 1 and analysis.seeds > 1:
                selected[digest] = _cell(f"{path.parent.name}, {study['preset']}", analysis, curves)
    # Presets that give the same numbers, trained under two names, are one cell.
    alike = {
        tuple(round(value, 3) for value in cell.scatter): cell
        for cell in reversed(selected.values())
    }
    return sorted(alike.values(), key=lambda cell: cell.noise)


def curve_of(size: Mapping[str, Any]) -> Curve:
    """Return the losses of one size as its transfer.json has them."""
    losses = {
        (p["log2_lr"], p["seed"]): math.inf if p["loss"] is None else p["loss"]
        for p in size["points"]
    }
    first = size["rates_chosen_by_seeds"]
    seeds = sorted({seed for _, seed in losses})
    every = seeds[: min(first, _least_seeds(size))]
    rates = sorted({rate for rate, _ in losses if all((rate, seed) in losses for seed in every)})
    values = [[losses.get((rate, seed), math.nan) for seed in seeds] for rate in rates]
    return Curve(np.array(rates), np.array(values), first)


def _least_seeds(size: Mapping[str, Any]) -> int:
    """Return the least number of seeds that a rate of this size has."""
    counts: dict[float, int] = {}
    for point in size["points"]:
        counts[point["log2_lr"]] = counts.get(point["log2_lr"], 0) + 1
    return min(counts.values())


def _cell(name: str, analysis: Analysis, curves: Sequence[Curve]) -> Cell:
    """Return the noise of one study, its sizes without an optimum left out."""
    seeds = analysis.seeds
    columns: dict[str, list[float]] = {
        field: [] for field in ("curvature", "single", "tilt", "level")
    }
    skews = []
    optima = []
    fitted = [index for index, fit in enumerate(analysis.fits) if not fit.trouble]
    for index in fitted:
        curve = curves[index]
        fit = analysis.fits[index]
        x = np.asarray(fit.used)
        losses = curve.losses[np.isin(curve.x, fit.used), :seeds]
        _, slope_map, _ = projection(x, fit.optimum)
        apart = losses - losses.mean(axis=1, keepdims=True)
        lines = np.stack([np.ones_like(x), x - x.mean()], axis=1)
        rest = apart - lines @ np.linalg.lstsq(lines, apart, rcond=None)[0]
        single = float((rest**2).sum()) / ((len(x) - 2) * (seeds - 1))
        slopes = slope_map @ apart
        tilt = float(slopes.var(ddof=1)) - single * float(slope_map @ slope_map)
        columns["curvature"].append(fit.curvature)
        columns["single"].append(math.sqrt(single))
        columns["tilt"].append(math.sqrt(max(0.0, tilt)))
        columns["level"].append(float(apart.mean(axis=0).std(ddof=1)))
        optima.append(-slopes / (2 * fit.curvature))
        skews.append(_skew(curve, fit.optimum, fit.curvature))
    doublings = np.log2([analysis.sizes[index] / analysis.sizes[fitted[0]] for index in fitted])
    covariance = np.cov(np.array(optima))
    return Cell(
        name=name,
        doublings=tuple(float(value) for value in doublings),
        skew=float(np.nanmedian(skews)) if np.isfinite(skews).any() else math.nan,
        scatter=tuple(float(value) for value in np.sqrt(np.diag(covariance))),
        scattered=tuple(tuple(float(value) for value in row) for row in covariance),
        freedom=seeds - 1,
        **{field: tuple(values) for field, values in columns.items()},
    )


def _skew(curve: Curve, optimum: float, curvature: float) -> float:
    u = curve.x - optimum
    near = np.isfinite(curve.mean) & (np.abs(u) <= 2.1)
    if near.sum() < 5:
        return math.nan
    cubic = np.polynomial.polynomial.polyfit(u[near], curve.mean[near], 3)[3]
    return float(3 * cubic / curvature)


# Simulated studies


class Simulated(transfer.Study):
    """A study whose points are not turned into configs, which takes longer than judging them."""

    def config(self, point: transfer.Point) -> Config:
        """Return the point itself, for `Losses`."""
        return cast("Config", point)


class Losses:
    """Stand-in for the engine: losses of a cell's curvature and noise whose optimum moves by a known drift."""

    def __init__(self, cell: Cell, drift: float, trial: int) -> None:
        self._cell = cell
        self._trial = trial
        start = OPTIMUM + np.random.default_rng([trial, 0]).uniform(-0.25, 0.25)
        self.optima = start + drift * np.array(cell.doublings)

    def __call__(self, configs: Sequence[Config]) -> list[Row]:
        points = cast("Sequence[transfer.Point]", configs)
        return [
            Row("", "", self._loss(point), None, None, (), 1, 0.0, "in turn") for point in points
        ]

    def _loss(self, point: transfer.Point) -> float:
        index, rate, seed = point
        octaves = rate * STEP - self.optima[index]
        cell = self._cell
        by_seed = np.random.default_rng([self._trial, 1, index, seed]).normal(size=2)
        by_run = np.random.default_rng([self._trial, 2, index, seed, int(rate) + 200]).normal()
        # Of curvature 1 at its minimum, and with a third derivative of 2 * SKEW.
        bowl = 2 / SKEW**2 * (math.exp(SKEW * octaves) - SKEW * octaves - 1)
        seeds_own = cell.level[index] * by_seed[0] + cell.tilt[index] * by_seed[1] * octaves
        return (
            3 + cell.curvature[index] * bowl + float(seeds_own) + cell.single[index] * float(by_run)
        )


def studied(cell: Cell) -> transfer.Study:
    """Return the study that stands for a cell: as many sizes as it has, each double the one before."""
    sizes = tuple(FIRST_SIZE * 2**index for index in range(len(cell.doublings)))
    study = transfer.plan(RECIPES["lm-tiny"](), "head_dim", sizes, PresetConfig(), "simulated")
    grown = tuple(round(FIRST_SIZE * 2**doubling) for doubling in cell.doublings)
    return Simulated(label=study.label, axis=study.axis, sizes=grown, configs=study.configs)


def outcomes(
    cell: Cell, drift: float | None, trials: int, seeds: int, max_seeds: int
) -> dict[str, float]:
    """Simulate studies, and return how often each verdict fell and how often the intervals held the truth.

    Args:
        drift: of all of them; each its own between -0.5 and 0.5 where it is None.
        seeds: at every rate.
        max_seeds: near the minima.
    """
    study = studied(cell)
    counts = dict.fromkeys(
        ("transfers", "drifts", "undecided", "covered", "price_covered", "seeds", "fitted"), 0.0
    )
    for trial in range(trials):
        own = np.random.default_rng([trial, 3]).uniform(-0.5, 0.5) if drift is None else drift
        losses = Losses(cell, float(own), trial)
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
            counts["covered"] += analysis.drift.low <= own <= analysis.drift.high
            counts["price_covered"] += _price_is_covered(cell, analysis, losses)
    shares = {
        name: round(counts[name] / trials, 4)
        for name in ("transfers", "drifts", "undecided", "seeds", "fitted")
    }
    for name in ("covered", "price_covered"):
        shares[name] = round(counts[name] / max(1.0, counts["fitted"]), 4)
    return shares


def _price_is_covered(cell: Cell, analysis: Analysis, losses: Losses) -> bool:
    """Return whether the interval of the largest size's price holds the true one; a price without a value counts as held."""
    price = analysis.prices[-1]
    octaves = losses.optima[0] - losses.optima[-1]
    bowl = 2 / SKEW**2 * (math.exp(SKEW * octaves) - SKEW * octaves - 1)
    true = cell.curvature[-1] * bowl
    return not math.isfinite(price.value) or price.low - 1e-9 <= true <= price.high


def simulated(cell: Cell, trials: int) -> dict[str, Any]:
    """Return all that is counted of one cell."""
    first = SEEDS[0]
    last = SEEDS[-1]
    return {
        **dataclasses.asdict(cell),
        "noise": cell.noise,
        "trials": trials,
        "verdicts": {f"{drift:g}": outcomes(cell, drift, trials, first, last) for drift in DRIFTS},
        "coverage": {f"{seeds}": outcomes(cell, None, trials, seeds, seeds) for seeds in SEEDS},
    }


# What it comes to


def correlation(selected: Sequence[Cell]) -> tuple[float, float]:
    """Return the mean correlation of a seed's optima at two sizes, and the drift's variance over that of independent sizes."""
    products = []
    ratios = []
    weights = []
    for cell in selected:
        covariance = np.array(cell.scattered)
        deviations = np.sqrt(np.diag(covariance))
        if (deviations == 0).any():
            continue
        pairs = np.triu_indices(len(covariance), 1)
        products.append(float((covariance / np.outer(deviations, deviations))[pairs].mean()))
        ratios.append(float(cell.weights @ covariance @ cell.weights) / cell.noise**2)
        weights.append(cell.freedom)
    return float(np.average(products, weights=weights)), float(np.average(ratios, weights=weights))


def document() -> str:
    """Return the section of docs/evidence/transfer.md on how far a verdict can be trusted."""
    record = disk.read_json(OUT)
    selected = sorted(record["cells"], key=lambda cell: cell["noise"])
    median = selected[len(selected) // 2]
    lines = [
        [
            "cell",
            "noise",
            "0: transfers",
            "0.22: transfers",
            "0.22: drifts",
            "0.30: transfers",
            "0.5: drifts",
        ]
    ]
    lines[0].append("seeds at 0")
    for cell in selected:
        by_drift = cell["verdicts"]
        name = cell["name"] if len(cell["name"]) < 40 else f"{cell['name'][:36]} ..."
        lines.append(
            [
                f"**{name}**" if cell is median else name,
                f"{cell['noise']:.2f}",
                *(
                    f"{by_drift[drift][verdict]:.1%}"
                    for drift, verdict in (
                        ("0", "transfers"), ("0.22", "transfers"), ("0.22", "drifts"),
                        ("0.3", "transfers"), ("0.5", "drifts"),
                    )
                ),
                f"{by_drift['0']['seeds']:.1f}",
            ]
        )  # fmt: skip
    coverage = [["seeds", "all cells", "least", "most", "price, all cells"]]
    for seeds in SEEDS:
        coverage.append(
            [str(seeds), *_coverage([cell["coverage"][f"{seeds}"] for cell in selected])]
        )
    for drift in DRIFTS:
        row = _coverage([cell["verdicts"][f"{drift:g}"] for cell in selected])
        coverage.append([f"added until decided, drift {drift:g}", *row])
    mean, ratio = record["correlation"]
    return TEXT.format(
        trials=selected[0]["trials"],
        cells=len(selected),
        committed=record["committed"],
        verdicts=table(lines),
        coverage=table(coverage),
        correlation=f"{mean:+.2f}",
        ratio=f"{ratio:.2f}",
    )


def _coverage(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the share of intervals that hold the truth over all cells, in the least and the most covered one, and of prices."""
    weights = [row["fitted"] for row in rows]
    shares = [row["covered"] for row in rows]
    overall = float(np.average(shares, weights=weights))
    prices = float(np.average([row["price_covered"] for row in rows], weights=weights))
    return [f"{overall:.1%}", f"{min(shares):.1%}", f"{max(shares):.1%}", f"{prices:.1%}"]


TEXT = """## How far to trust a verdict

{trials} simulated studies for each drift and for each of {cells} cells, of {committed} in all: a cell is the noise, the curvature and the
number of sizes of one committed study, its noise the standard deviation of the drift from one seed, in octaves per doubling. Every
simulated study is measured and judged by the command's own code: 3 seeds, then more until it is decided, at most 8
(`python -m scripts.studies.verdicts`). Before the last seed a study ends only if an interval of 98 % decides too, because each look is one
more chance to be wrong. The columns give the true drift and how often it got that verdict; the middle one of these
cells is in bold.

{verdicts}

A drift of 0.22 lies between the two bounds, where either verdict can fall. Cells whose noise is above about 0.2 need more than 8 seeds.

How often a 95 % interval holds the true drift, with a drift between -0.5 and 0.5 and a fixed number of seeds; and when seeds are
added until the verdict is decided. The last column is that of the price of not retuning at the largest size.

{coverage}

The intervals take a seed's effects at two sizes as independent. In the committed studies their correlation is {correlation} on
average, and the variance of a drift between seeds {ratio} times what independence says.
"""


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    studies: int = 400
    """Number of simulated studies for each drift and cell."""
    processes: int = 1
    """Cells at the same time."""
    cells: int | None = None
    """Number of cells, spread evenly over their noise; all by default."""
    render: Switch = False
    """Simulate nothing: print what is there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate every cell that is not there, and write the record; 0."""
    args = harness.parse(Options, argv)
    if not args.render:
        for count, record in enumerate(_records(args.studies, args.processes, args.cells)):
            disk.write_whole(OUT, json.dumps(record, indent=1) + "\n")
            print(
                f"{count + 1}: {len(record['cells'])} cells in {OUT.relative_to(ROOT)}", flush=True
            )
    print(document())
    return 0


def _records(trials: int, processes: int, count: int | None) -> Iterator[dict[str, Any]]:
    """Yield the whole record, once as it is and again after each cell that was missing."""
    every = cells()
    mean, ratio = correlation(every)
    stored = disk.read_json(OUT)["cells"] if OUT.exists() else []
    names = [cell.name for cell in every]
    done = {
        cell["name"]: cell for cell in stored if cell["trials"] == trials and cell["name"] in names
    }
    yield {
        "committed": len(every),
        "correlation": [round(mean, 4), round(ratio, 4)],
        "cells": list(done.values()),
    }
    missing = [cell for cell in spread(every)[:count] if cell.name not in done]
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(simulated, cell, trials) for cell in missing]
        for future in concurrent.futures.as_completed(futures):
            cell = future.result()
            done[cell["name"]] = cell
            yield {
                "committed": len(every),
                "correlation": [round(mean, 4), round(ratio, 4)],
                "cells": list(done.values()),
            }


def spread(every: Sequence[Cell]) -> list[Cell]:
    """Return the cells in an order whose every beginning spans the noise: the median, then the quarters, and so on."""
    order: list[Cell] = []
    spans = [(0, len(every))]
    while spans:
        low, high = spans.pop(0)
        if low < high:
            middle = (low + high) // 2
            order.append(every[middle])
            spans += [(low, middle), (middle + 1, high)]
    return order


if __name__ == "__main__":
    raise SystemExit(main())
