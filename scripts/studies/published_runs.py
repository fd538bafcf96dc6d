"""What 1,073 published runs of dense decoders say of learning rates, batches and losses: docs/evidence/published-runs.md.

    python -m scripts.studies.published_runs forecast TABLE.csv   # docs/evidence/forecasts/published-dense.json
    python -m scripts.studies.published_runs law TABLE.csv        # the law that comes with mupax, without the runs
    python -m scripts.studies.published_runs study TABLE.csv      # published-runs/result.json: left-out settings, rules, exponents
    python -m scripts.studies.published_runs_page                 # the page and its picture from that

The table has no licence and is not part of the project; its sha256 is in the results. Columns: parameters (without embeddings),
tokens, peak_lr, batch_sequences (of 2,048 tokens), loss (training loss at the end, nats per token).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from scipy import stats

from mupax import disk
from mupax.train.studies.tables import stored
from mupax.train.studies.tables import table as tables
from mupax.train.studies.tables.forecast import Forecaster
from mupax.train.studies.tables.law import Form, form_of, settings_of
from mupax.train.studies.tables.table import RunTable
from scripts import ROOT

FORECAST = ROOT / "docs" / "evidence" / "forecasts" / "published-dense.json"
RESULT = ROOT / "docs" / "evidence" / "published-runs" / "result.json"
PICTURE = ROOT / "docs" / "evidence" / "published-runs" / "exponents.png"
PAGE = ROOT / "docs" / "evidence" / "published-runs.md"
SETTINGS = (
    (429_260_800, 22.7e9), (429_260_800, 40e9), (429_260_800, 50e9),
    (536_872_960, 10e9), (536_872_960, 28.4e9), (536_872_960, 50e9),
    (1_073_741_824, 20e9), (1_073_741_824, 56.9e9),
)  # fmt: skip
"""Parameters and tokens of the settings that are forecast; their runs were not seen."""
RATES = 2.0 ** np.arange(-12, -5.4, 0.5)
BATCHES = np.array([16, 24, 32, 64, 96, 128, 192, 256, 352, 512, 736, 1024, 2048], float)
NEAR = math.log(1.1)
"""Log of the loss over its setting's best one up to which a run is held against its interval."""
FIXED_BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
BOTTOM = 0.012
"""Excess of the log loss up to which runs of one batch give its best rate."""
SEED = 0
ISOFLOPS = (
    (1e18, 3.522),
    (3e18, 3.339),
    (1e19, 3.154),
    (3e19, 3.000),
    (1e20, 2.848),
    (3e20, 2.725),
    (1e21, 2.599),
)
"""Training FLOPs and macro losses of published mixtures of experts, at the best size of each budget."""
ISOFLOP_GOALS = ((1e19, 1e21, 2.599), (3e20, 1e21, 2.599), (1e21, 1e23, 2.234))
"""FLOPs up to which points are used, FLOPs that are forecast, and the loss that came."""
CLAIMS = {
    "no change": (0.0, "one rate for every length"),
    "horizon": (-0.32, "Bjorck et al. 2024 (2409.19913), batch fixed"),
    "complete-d": (-0.5, "Complete(d)P 2025 (2512.22382), batch fixed"),
    "deepseek": (-0.125, "DeepSeek LLM 2024 (2401.02954), batch grows"),
    "step-law": (0.307, "Step Law 2025 (2503.04715), batch grows; fitted to these runs, too"),
}
"""Exponent of the best rate in tokens that a source has."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Exponents by which a source moves rate and batch as tokens grow.

    Attributes:
        rate: exponent of the rate in tokens.
        batch: exponent of the batch in tokens.
    """

    rate: float
    batch: float


JOINT = {
    "nothing moves": Rule(0.0, 0.0),
    "horizon": Rule(-0.32, 0.0),
    "complete-d, batch fixed": Rule(-0.5, 0.0),
    "complete-d, batch as sqrt(tokens)": Rule(-0.25, 0.5),
    "complete-d, batch as tokens": Rule(0.0, 1.0),
    "sde, batch as tokens": Rule(0.5, 1.0),
    "deepseek": Rule(-0.125, 0.327),
    "step-law": Rule(0.307, 0.571),
    "sde, batch as sqrt(tokens)": Rule(0.25, 0.5),
}
"""Rules with the batch that each source assumes. Those of `sde` and `complete-d`, B^1/2 and (B/T)^1/2, hold for any batch."""


def grid(place: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return every rate and batch of a setting."""
    rates, batches = (axis.ravel() for axis in np.meshgrid(RATES, BATCHES, indexing="ij"))
    points = {axis: np.full(len(rates), value) for axis, value in place.items()}
    return {**points, "peak_lr": rates, "batch_sequences": batches}


def forecast(table: RunTable) -> list[dict[str, Any]]:
    """Return the forecast of each of `SETTINGS`."""
    forecaster = Forecaster.of_table(table)
    rows = []
    for parameters, tokens in SETTINGS:
        place = {"parameters": float(parameters), "tokens": float(tokens)}
        points = grid(place)
        lowest = forecaster.lowest(place, points)
        best = forecaster.best(place)
        assert best.peak_lr is not None
        assert best.batch_sequences is not None
        intervals = forecaster.points(place, points)
        rows.append(
            {
                "parameters": parameters,
                "tokens": round(tokens),
                "loss": round(lowest.value, 5),
                "low": round(lowest.low, 5),
                "high": round(lowest.high, 5),
                "peak_lr": round(best.peak_lr.value, 7),
                "batch_sequences": round(best.batch_sequences.value),
                "points": [
                    {
                        "peak_lr": round(float(rate), 7),
                        "batch_sequences": int(batch),
                        "loss": round(interval.value, 5),
                        "low": round(interval.low, 5),
                        "high": round(interval.high, 5),
                    }
                    for rate, batch, interval in zip(
                        points["peak_lr"], points["batch_sequences"], intervals, strict=True
                    )
                ],
            }
        )
    return rows


def left_out(
    table: RunTable,
    change: Callable[[RunTable], RunTable] | None = None,
    form: Callable[[Form], Form] | None = None,
) -> list[dict[str, Any]]:
    """Return what the law of the other settings says of each setting, beside what came.

    Args:
        table: of all runs.
        change: what a control does to the runs that are fitted.
        form: what a control does to the law.
    """
    setting = settings_of(table)
    rows = []
    for index in range(setting.max() + 1):
        fitted = table.subset(setting != index)
        test = table.subset(setting == index)
        fitted = change(fitted) if change else fitted
        forecaster = Forecaster.of_table(fitted, form(form_of(fitted)) if form else None)
        place = {axis: float(test.values[axis][0]) for axis in ("parameters", "tokens")}
        lowest = forecaster.lowest(place, grid(place))
        best = forecaster.best(place)
        assert best.peak_lr is not None
        assert best.batch_sequences is not None
        came = math.exp(float(test.log_loss.min()))
        near = test.subset(test.log_loss - test.log_loss.min() < NEAR)
        intervals = forecaster.points(place, near.values)
        inside = [
            interval.low <= math.exp(loss) <= interval.high
            for interval, loss in zip(intervals, near.log_loss, strict=True)
        ]
        lost = regret(test, best.peak_lr.value, best.batch_sequences.value)
        rows.append(
            {
                **place,
                "loss": round(lowest.value, 4),
                "low": round(lowest.low, 4),
                "high": round(lowest.high, 4),
                "came": round(came, 4),
                "error": round(lowest.value / came - 1, 5),
                "inside": bool(lowest.low <= came <= lowest.high),
                "points_inside": round(float(np.mean(inside)), 3),
                "half_width": round(
                    float(np.median([interval.half_width for interval in intervals])), 5
                ),
                "peak_lr": round(best.peak_lr.value, 6),
                "batch_sequences": round(best.batch_sequences.value),
                "lost": round(lost, 5),
            }
        )
    return rows


def regret(test: RunTable, peak_lr: float, batch_sequences: float) -> float:
    """Return the share of the loss that the nearest measured run loses against the best one of its setting."""
    rate = np.log2(test.values["peak_lr"] / peak_lr)
    batch = np.log2(test.values["batch_sequences"] / batch_sequences)
    nearest = int(np.argmin(rate**2 + batch**2))
    return math.expm1(float(test.log_loss[nearest] - test.log_loss.min()))


def shuffled(table: RunTable) -> RunTable:
    """Return the table with its learning rates in another order."""
    generator = np.random.default_rng(SEED)
    return dataclasses.replace(
        table, values={**table.values, "peak_lr": generator.permutation(table.values["peak_lr"])}
    )


def without_tokens(form: Form) -> Form:
    """Return a law in which nothing depends on tokens."""
    terms = []
    for term in form.terms:
        if "tokens" in term.needs:
            continue
        exponents = {axis: prior for axis, prior in term.exponents.items() if axis != "tokens"}
        terms.append(dataclasses.replace(term, exponents=exponents))
    return dataclasses.replace(form, terms=tuple(terms))


def best_rate(log2_rate: np.ndarray, log_loss: np.ndarray) -> float | None:
    """Return log2 of the best rate of runs that differ in nothing else, by a parabola; None where it is at an end of the rates."""
    order = np.argsort(log2_rate)
    rate = log2_rate[order]
    loss = log_loss[order]
    lowest = int(np.argmin(loss))
    if lowest in (0, len(rate) - 1):
        return None
    off = rate - rate[lowest]
    chosen = (loss - loss[lowest] < BOTTOM) & (np.abs(off) < 2.1)
    if chosen.sum() < 4:
        chosen = np.abs(off) < 1.1
    curvature, slope, _ = np.polyfit(off[chosen], loss[chosen], 2)
    if curvature <= 0 or abs(slope / curvature / 2) > 1:
        return None
    return float(rate[lowest] - slope / curvature / 2)


def rate_exponents(table: RunTable) -> list[dict[str, Any]]:
    """Return the exponent of the best rate in tokens at each batch, with a 95 % interval: one slope, a height for each model size."""
    rows = []
    forecaster = Forecaster.of_table(table)
    for batch in FIXED_BATCHES:
        places: list[tuple[float, float, float]] = []
        for parameters in np.unique(table.values["parameters"]):
            for tokens in np.unique(
                table.values["tokens"][table.values["parameters"] == parameters]
            ):
                chosen = (
                    (table.values["parameters"] == parameters)
                    & (table.values["tokens"] == tokens)
                    & (table.values["batch_sequences"] == batch)
                    & np.isfinite(table.log_loss)
                )
                if chosen.sum() < 5:
                    continue
                best = best_rate(np.log2(table.values["peak_lr"][chosen]), table.log_loss[chosen])
                if best is not None:
                    places.append((float(parameters), math.log2(tokens), best))
        sizes = sorted({place[0] for place in places})
        design = np.array(
            [[place[1] - 34] + [float(place[0] == size) for size in sizes] for place in places]
        )
        best_rates = np.array([place[2] for place in places])
        solution, *_ = np.linalg.lstsq(design, best_rates, rcond=None)
        freedom = len(places) - design.shape[1]
        variance = (
            float(((design @ solution - best_rates) ** 2).sum())
            / freedom
            * np.linalg.inv(design.T @ design)[0, 0]
        )
        half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
        rows.append(
            {
                "batch_sequences": batch,
                "exponent": round(float(solution[0]), 3),
                "low": round(float(solution[0]) - half, 3),
                "high": round(float(solution[0]) + half, 3),
                "settings": len(places),
                "law": round(_law_exponent(forecaster, float(batch)), 3),
                "best": [
                    {"parameters": size, "tokens": 2.0**log2_tokens, "log2_lr": round(best, 3)}
                    for size, log2_tokens, best in places
                ],
            }
        )
    return rows


def _law_exponent(forecaster: Forecaster, batch: float) -> float:
    """Return the law's exponent of the best rate in tokens at a batch, from 10 to 40 billion."""
    rates = 2.0 ** np.arange(-14, -3, 0.02)
    best = []
    for tokens in (1e10, 4e10):
        losses, _ = forecaster.fit.log_loss(
            {"parameters": 2.4e8, "tokens": tokens, "peak_lr": rates, "batch_sequences": batch}
        )
        best.append(math.log2(rates[int(losses.argmin())]))
    return (best[1] - best[0]) / 2


def interpolated(test: RunTable, batch: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Return log2 rates and log losses of a setting at a batch that was measured; None where too few runs were."""
    chosen = (test.values["batch_sequences"] == batch) & np.isfinite(test.log_loss)
    if chosen.sum() < 5:
        return None
    order = np.argsort(test.values["peak_lr"][chosen])
    return np.log2(test.values["peak_lr"][chosen][order]), test.log_loss[chosen][order]


def fixed_batch_regrets(table: RunTable) -> dict[str, dict[str, float]]:
    """Return what each claimed exponent loses at fixed batch: from the shortest length of a model to each longer one.

    The rate is the best of the shorter run at that batch times the ratio of tokens to the exponent; the loss between two measured
    rates is interpolated, and held against the lowest measured one at the same batch.
    """
    lost: dict[str, list[float]] = {name: [] for name in CLAIMS}
    for _, shorter, longer, ratio in _pairs(table):
        for batch in FIXED_BATCHES:
            before = interpolated(shorter, batch)
            after = interpolated(longer, batch)
            if before is None or after is None:
                continue
            base = best_rate(*before)
            if base is None:
                continue
            for name, (exponent, _) in CLAIMS.items():
                rate = base + exponent * math.log2(ratio)
                loss = float(np.interp(rate, *after))
                lost[name].append(math.expm1(loss - float(after[1].min())))
    return {name: _summary(values) for name, values in lost.items()}


def joint_regrets(table: RunTable) -> dict[str, dict[str, float]]:
    """Return what each rule loses against the joint best when rate and batch both move as its source says."""
    lost: dict[str, list[float]] = {name: [] for name in JOINT}
    lost["this law, without the longer run's setting"] = []
    setting = settings_of(table)
    for index, shorter, longer, ratio in _pairs(table):
        best = int(np.argmin(shorter.log_loss))
        rate = float(shorter.values["peak_lr"][best])
        batch = float(shorter.values["batch_sequences"][best])
        for name, rule in JOINT.items():
            lost[name].append(regret(longer, rate * ratio**rule.rate, batch * ratio**rule.batch))
        forecaster = Forecaster.of_table(table.subset(setting != index))
        recommended = forecaster.best(
            {axis: float(longer.values[axis][0]) for axis in ("parameters", "tokens")}
        )
        assert recommended.peak_lr is not None
        assert recommended.batch_sequences is not None
        lost["this law, without the longer run's setting"].append(
            regret(longer, recommended.peak_lr.value, recommended.batch_sequences.value)
        )
    return {name: _summary(values) for name, values in lost.items()}


def _pairs(table: RunTable) -> list[tuple[int, RunTable, RunTable, float]]:
    """Return each model's shorter and longer runs, with the longer setting's index and the ratio of tokens."""
    setting = settings_of(table)
    parts = [table.subset(setting == index) for index in range(setting.max() + 1)]
    pairs = []
    for shorter in parts:
        for index, longer in enumerate(parts):
            same = shorter.values["parameters"][0] == longer.values["parameters"][0]
            ratio = float(longer.values["tokens"][0] / shorter.values["tokens"][0])
            if same and ratio > 1:
                pairs.append((index, shorter, longer, ratio))
    return pairs


def _summary(values: list[float]) -> dict[str, float]:
    """Return median, nine tenths and worst of what is lost, as shares of the loss."""
    return {
        "count": len(values),
        "median": round(float(np.median(values)), 5),
        "high": round(float(np.quantile(values, 0.9)), 5),
        "worst": round(max(values), 5),
    }


def isoflop() -> list[dict[str, Any]]:
    """Return what the same law, of training FLOPs alone, says of published isoflop losses beyond those that it is fitted to."""
    rows = []
    for upto, goal, came in ISOFLOP_GOALS:
        fitted = [(flops, loss) for flops, loss in ISOFLOPS if flops <= upto]
        table = RunTable(
            source="isoflop",
            digest="",
            values={"flops": np.array([flops for flops, _ in fitted])},
            log_loss=np.log([loss for _, loss in fitted]),
            seeds=np.ones(len(fitted), int),
            seed_deviation=None,
            decay=None,
            rows=len(fitted),
            notes=(),
        )
        loss = Forecaster.of_table(table).best({"flops": goal}).loss
        rows.append(
            {
                "upto": upto,
                "goal": goal,
                "came": came,
                **{k: round(v, 4) for k, v in dataclasses.asdict(loss).items()},
            }
        )
    return rows


def study(table: RunTable) -> dict[str, Any]:
    """Return everything that the page shows."""
    return {
        "table": {"sha256": table.digest, "rows": table.rows},
        "left_out": left_out(table),
        "controls": {
            "shuffled rates": left_out(table, change=shuffled),
            "no tokens": left_out(table, form=without_tokens),
        },
        "exponents": rate_exponents(table),
        "fixed_batch": fixed_batch_regrets(table),
        "joint": joint_regrets(table),
        "isoflop": isoflop(),
    }


@dataclasses.dataclass
class Options:
    """Part of the study that is made, and the table that it is made from."""

    part: tyro.conf.Positional[Literal["forecast", "law", "study"]]
    """forecast: of the settings that were not seen. law: the file that `mupax plan` reads. study: the results."""
    table: tyro.conf.Positional[Path]
    """The published runs."""


def main() -> None:
    """Make a part."""
    options = tyro.cli(
        Options, prog="python -m scripts.studies.published_runs", description=__doc__
    )
    table = tables.read(options.table)
    if options.part == "forecast":
        path, content = FORECAST, forecast(table)
    elif options.part == "law":
        path, content = stored.DENSE, stored.to_json(Forecaster.of_table(table))
    else:
        path, content = RESULT, study(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(path, json.dumps(content, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
