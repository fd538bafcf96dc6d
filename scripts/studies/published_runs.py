"""Study of 1,073 published runs of dense decoders: their law, forecasts and rules for longer runs.

    python -m scripts.studies.published_runs forecast TABLE.csv
    python -m scripts.studies.published_runs law TABLE.csv
    python -m scripts.studies.published_runs study TABLE.csv

`forecast` writes docs/evidence/forecasts/published-dense.json. `law` writes the law that comes with
mupax, without the runs. `study` writes docs/evidence/published-runs/result.json: left-out settings,
rules and exponents. `python -m scripts.studies.published_runs_page` then writes the page.

The table has no licence and is not part of the project; its sha256 is in the results. Columns:
parameters (without embeddings), tokens, peak_lr, batch_sequences (of 2,048 tokens), loss (training
loss at the end, in nats per token).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from scipy import stats

from mupax import disk
from mupax.train.studies.tables import evidence
from mupax.train.studies.tables import table as tables
from mupax.train.studies.tables.forecast import Forecaster
from mupax.train.studies.tables.law import Form, form_of, settings_of
from mupax.train.studies.tables.table import RunTable
from scripts import ROOT

FORECAST = ROOT / "docs" / "evidence" / "forecasts" / "published-dense.json"
RESULT = ROOT / "docs" / "evidence" / "published-runs" / "result.json"
PICTURE = ROOT / "docs" / "evidence" / "published-runs" / "exponents.png"
PAGE = ROOT / "docs" / "evidence" / "forecasts.md"
SETTINGS = (
    (429_260_800, 22.7e9), (429_260_800, 40e9), (429_260_800, 50e9),
    (536_872_960, 10e9), (536_872_960, 28.4e9), (536_872_960, 50e9),
    (1_073_741_824, 20e9), (1_073_741_824, 56.9e9),
)  # fmt: skip
"""Parameters and tokens of the settings that are forecast. Their runs were not seen."""
RATES = 2.0 ** np.arange(-12, -5.4, 0.5)
"""Peak learning rates of the grid."""
BATCHES = np.array([16, 24, 32, 64, 96, 128, 192, 256, 352, 512, 736, 1024, 2048], float)
"""Batches of the grid, in sequences."""
NEAR = math.log(1.1)
"""Excess over a setting's lowest log loss, below which a run's forecast interval is tested."""
FIXED_BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
"""Batches at which exponents in tokens are measured, in sequences."""
BOTTOM = 0.012
"""Excess over the lowest log loss of a batch, below which a run is fitted for the best rate."""
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
"""Training FLOPs and losses of published mixtures of experts at the best size of each budget."""


class IsoflopGoal(NamedTuple):
    """Forecast of a loss from the points of smaller budgets."""

    upto: float
    """Largest FLOPs of the fitted points."""
    goal: float
    """FLOPs of the forecast loss."""
    came: float
    """Loss that was published for `goal`."""


ISOFLOP_GOALS = (
    IsoflopGoal(1e19, 1e21, 2.599),
    IsoflopGoal(3e20, 1e21, 2.599),
    IsoflopGoal(1e21, 1e23, 2.234),
)
CLAIMS = {
    "no change": (0.0, "one rate for every length"),
    "horizon": (-0.32, "Bjorck et al. 2024 (2409.19913), batch fixed"),
    "complete-d": (-0.5, "Complete(d)P 2025 (2512.22382), batch fixed"),
    "deepseek": (-0.125, "DeepSeek LLM 2024 (2401.02954), batch grows"),
    "step-law": (0.307, "Step Law 2025 (2503.04715), batch grows; fitted to these runs, too"),
}
"""Name of a rule to the exponent of the best rate in tokens, and its source."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Exponents by which a source moves rate and batch as tokens grow.

    Attributes:
        rate: Exponent of the rate in tokens, T^rate.
        batch: Exponent of the batch in tokens, T^batch.
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
"""Rules with the batch that each source assumes. `sde`, B^1/2, and `complete-d`, (B/T)^1/2, hold
for any batch."""


def grid(setting: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return the columns of all pairs of `RATES` and `BATCHES` at one setting.

    Args:
        setting: `parameters` and `tokens`.
    """
    rates, batches = np.meshgrid(RATES, BATCHES, indexing="ij")
    columns = {axis: np.full(rates.size, value) for axis, value in setting.items()}
    return {**columns, "peak_lr": rates.ravel(), "batch_sequences": batches.ravel()}


def forecast(table: RunTable) -> list[dict[str, Any]]:
    """Return a forecast for each of `SETTINGS`: lowest loss, best rate and batch, loss on the grid."""
    forecaster = Forecaster.of_table(table)
    rows = []
    for parameters, tokens in SETTINGS:
        setting = {"parameters": float(parameters), "tokens": float(tokens)}
        columns = grid(setting)
        lowest = forecaster.lowest(setting, columns)
        best = forecaster.best(setting)
        assert best.peak_lr is not None
        assert best.batch_sequences is not None

        points = []
        intervals = forecaster.points(setting, columns)
        for rate, batch, interval in zip(
            columns["peak_lr"], columns["batch_sequences"], intervals, strict=True
        ):
            points.append(
                {
                    "peak_lr": round(float(rate), 7),
                    "batch_sequences": int(batch),
                    "loss": round(interval.value, 5),
                    "low": round(interval.low, 5),
                    "high": round(interval.high, 5),
                }
            )
        rows.append(
            {
                "parameters": parameters,
                "tokens": round(tokens),
                "loss": round(lowest.value, 5),
                "low": round(lowest.low, 5),
                "high": round(lowest.high, 5),
                "peak_lr": round(best.peak_lr.value, 7),
                "batch_sequences": round(best.batch_sequences.value),
                "points": points,
            }
        )
    return rows


def left_out(
    table: RunTable,
    change: Callable[[RunTable], RunTable] | None = None,
    form: Callable[[Form], Form] | None = None,
) -> list[dict[str, Any]]:
    """Forecast each setting by a law of the other settings, and return forecasts with outcomes.

    Args:
        change: Change that a control makes to the fitted runs.
        form: Change that a control makes to the law.
    """
    setting_of_run = settings_of(table)
    rows = []
    for index in range(setting_of_run.max() + 1):
        fitted = table.subset(setting_of_run != index)
        test = table.subset(setting_of_run == index)
        if change:
            fitted = change(fitted)
        law = form(form_of(fitted)) if form else None
        forecaster = Forecaster.of_table(fitted, law)

        # All runs of a setting share these two values.
        setting = {axis: float(test.values[axis][0]) for axis in ("parameters", "tokens")}
        lowest = forecaster.lowest(setting, grid(setting))
        best = forecaster.best(setting)
        assert best.peak_lr is not None
        assert best.batch_sequences is not None
        outcome = math.exp(float(test.log_loss.min()))

        near = test.subset(test.log_loss - test.log_loss.min() < NEAR)
        intervals = forecaster.points(setting, near.values)
        inside = []
        for interval, log_loss in zip(intervals, near.log_loss, strict=True):
            inside.append(interval.low <= math.exp(log_loss) <= interval.high)
        half_width = float(np.median([interval.half_width for interval in intervals]))

        lost = regret(test, best.peak_lr.value, best.batch_sequences.value)
        rows.append(
            {
                **setting,
                "loss": round(lowest.value, 4),
                "low": round(lowest.low, 4),
                "high": round(lowest.high, 4),
                "came": round(outcome, 4),
                "error": round(lowest.value / outcome - 1, 5),
                "inside": bool(lowest.low <= outcome <= lowest.high),
                "points_inside": round(float(np.mean(inside)), 3),
                "half_width": round(half_width, 5),
                "peak_lr": round(best.peak_lr.value, 6),
                "batch_sequences": round(best.batch_sequences.value),
                "lost": round(lost, 5),
            }
        )
    return rows


def regret(test: RunTable, peak_lr: float, batch_sequences: float) -> float:
    """Return the loss at a rate and batch over the lowest loss of a setting, less 1.

    The measured run nearest to the rate and batch, in octaves, gives the loss.

    Args:
        test: Runs that share model size and tokens.
    """
    rate = np.log2(test.values["peak_lr"] / peak_lr)
    batch = np.log2(test.values["batch_sequences"] / batch_sequences)
    # The measured run that is nearest to the recommendation, in octaves, stands for it.
    nearest = int(np.argmin(rate**2 + batch**2))
    # The difference of two log losses is the log of their ratio.
    return math.expm1(float(test.log_loss[nearest] - test.log_loss.min()))


def shuffled(table: RunTable) -> RunTable:
    """Return the table with its learning rates permuted, as a control."""
    generator = np.random.default_rng(SEED)
    rates = generator.permutation(table.values["peak_lr"])
    return dataclasses.replace(table, values={**table.values, "peak_lr": rates})


def without_tokens(form: Form) -> Form:
    """Return a law without any dependence on tokens, as a control."""
    terms = []
    for term in form.terms:
        if "tokens" in term.needs:
            continue
        exponents = dict(term.exponents)
        exponents.pop("tokens", None)
        terms.append(dataclasses.replace(term, exponents=exponents))
    return dataclasses.replace(form, terms=tuple(terms))


def best_rate(log2_rate: np.ndarray, log_loss: np.ndarray) -> float | None:
    """Return log2 of the best rate of runs that differ only in the rate, by a parabola.

    `None` if the lowest loss is at the smallest or the largest rate, or the parabola has no minimum
    within an octave of the lowest loss.

    Args:
        log2_rate: log2 of the learning rate of each run, in any order.
        log_loss: Logarithm of the loss of each run.
    """
    order = np.argsort(log2_rate)
    rate = log2_rate[order]
    loss = log_loss[order]
    lowest = int(np.argmin(loss))
    if lowest in (0, len(rate) - 1):
        return None
    octaves = rate - rate[lowest]
    chosen = (loss - loss[lowest] < BOTTOM) & (np.abs(octaves) < 2.1)
    # With few runs near the bottom the fit takes the lowest run and its neighbours.
    if chosen.sum() < 4:
        chosen = np.abs(octaves) < 1.1
    curvature, slope, _ = np.polyfit(octaves[chosen], loss[chosen], 2)
    if curvature <= 0 or abs(slope / curvature / 2) > 1:
        return None
    return float(rate[lowest] - slope / curvature / 2)


class BestRate(NamedTuple):
    """Best rate of one model size, length and batch."""

    parameters: float
    log2_tokens: float
    log2_lr: float


def _best_rates(table: RunTable, batch: int) -> list[BestRate]:
    """Return the best rates of settings with five or more runs at a batch and a minimum inside."""
    values = table.values
    rows = []
    for parameters in np.unique(values["parameters"]):
        of_size = values["parameters"] == parameters
        for tokens in np.unique(values["tokens"][of_size]):
            chosen = (
                of_size
                & (values["tokens"] == tokens)
                & (values["batch_sequences"] == batch)
                & np.isfinite(table.log_loss)
            )
            if chosen.sum() < 5:
                continue
            best = best_rate(np.log2(values["peak_lr"][chosen]), table.log_loss[chosen])
            if best is not None:
                rows.append(BestRate(float(parameters), math.log2(tokens), best))
    return rows


def rate_exponents(table: RunTable) -> list[dict[str, Any]]:
    """Return the exponent of the best rate in tokens at each batch, with a 95 % interval.

    The exponent is the slope of a least-squares fit over all settings, with an intercept for each
    model size.
    """
    rows = []
    forecaster = Forecaster.of_table(table)
    for batch in FIXED_BATCHES:
        best_rates = _best_rates(table, batch)
        sizes = sorted({row.parameters for row in best_rates})
        design = []
        for row in best_rates:
            # Centred near the middle of the lengths, 2^34 = 17 billion tokens.
            intercepts = [float(row.parameters == size) for size in sizes]
            design.append([row.log2_tokens - 34, *intercepts])
        x = np.array(design)
        y = np.array([row.log2_lr for row in best_rates])
        solution, *_ = np.linalg.lstsq(x, y, rcond=None)

        freedom = len(best_rates) - x.shape[1]
        residual = float(((x @ solution - y) ** 2).sum())
        # The first coefficient is the slope in tokens.
        variance = residual / freedom * np.linalg.inv(x.T @ x)[0, 0]
        half_width = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
        slope = float(solution[0])

        best = []
        for row in best_rates:
            tokens = 2.0**row.log2_tokens
            rate = round(row.log2_lr, 3)
            best.append({"parameters": row.parameters, "tokens": tokens, "log2_lr": rate})
        rows.append(
            {
                "batch_sequences": batch,
                "exponent": round(slope, 3),
                "low": round(slope - half_width, 3),
                "high": round(slope + half_width, 3),
                "settings": len(best_rates),
                "law": round(_law_exponent(forecaster, float(batch)), 3),
                "best": best,
            }
        )
    return rows


def _law_exponent(forecaster: Forecaster, batch: float) -> float:
    """Return the law's exponent of the best rate in tokens, from 10 to 40 billion tokens.

    The model has 240 million parameters.
    """
    rates = 2.0 ** np.arange(-14, -3, 0.02)
    best = []
    for tokens in (1e10, 4e10):
        losses, _ = forecaster.fit.log_loss(
            {"parameters": 2.4e8, "tokens": tokens, "peak_lr": rates, "batch_sequences": batch}
        )
        best.append(math.log2(rates[int(losses.argmin())]))
    # From 10 to 40 billion tokens are two doublings.
    return (best[1] - best[0]) / 2


class RateCurve(NamedTuple):
    """Measured losses of one setting and batch, in the order of the rates."""

    log2_rates: np.ndarray
    """log2 of the peak learning rates, ascending."""
    log_losses: np.ndarray
    """Logarithm of the loss at each rate."""


def rate_curve(test: RunTable, batch: float) -> RateCurve | None:
    """Return the losses of a setting at one batch, or `None` with fewer than five finite runs.

    Args:
        test: Runs that share model size and tokens.
    """
    chosen = (test.values["batch_sequences"] == batch) & np.isfinite(test.log_loss)
    if chosen.sum() < 5:
        return None
    order = np.argsort(test.values["peak_lr"][chosen])
    rates = test.values["peak_lr"][chosen][order]
    return RateCurve(np.log2(rates), test.log_loss[chosen][order])


def fixed_batch_regrets(table: RunTable) -> dict[str, dict[str, float]]:
    """Return what each exponent of `CLAIMS` costs when a rate is moved to a longer run.

    The rate is the shorter run's best rate at the batch times (ratio of tokens)^exponent. Its loss
    is interpolated between measured rates and compared with the lowest measured loss at the batch.

    Returns:
        By name of the claim, a `_summary` of the lost shares of the loss.
    """
    lost: dict[str, list[float]] = {name: [] for name in CLAIMS}
    for pair in _pairs(table):
        for batch in FIXED_BATCHES:
            before = rate_curve(pair.shorter, batch)
            after = rate_curve(pair.longer, batch)
            if before is None or after is None:
                continue
            base = best_rate(before.log2_rates, before.log_losses)
            if base is None:
                continue
            for name, (exponent, _) in CLAIMS.items():
                rate = base + exponent * math.log2(pair.ratio)
                loss = float(np.interp(rate, after.log2_rates, after.log_losses))
                lost[name].append(math.expm1(loss - float(after.log_losses.min())))
    return {name: _summary(values) for name, values in lost.items()}


def joint_regrets(table: RunTable) -> dict[str, dict[str, float]]:
    """Return what each rule of `JOINT` costs when it moves rate and batch to a longer run.

    Rate and batch both move from the shorter run's best values as the rule says. The fitted law of
    all other settings is compared, too.

    Returns:
        By name of the rule, a `_summary` of the lost shares of the loss.
    """
    by_law = "this law, without the longer run's setting"
    lost: dict[str, list[float]] = {name: [] for name in JOINT}
    lost[by_law] = []
    setting_of_run = settings_of(table)
    for pair in _pairs(table):
        shorter = pair.shorter
        best = int(np.argmin(shorter.log_loss))
        rate = float(shorter.values["peak_lr"][best])
        batch = float(shorter.values["batch_sequences"][best])
        for name, rule in JOINT.items():
            new_rate = rate * pair.ratio**rule.rate
            new_batch = batch * pair.ratio**rule.batch
            lost[name].append(regret(pair.longer, new_rate, new_batch))

        forecaster = Forecaster.of_table(table.subset(setting_of_run != pair.index))
        setting = {axis: float(pair.longer.values[axis][0]) for axis in ("parameters", "tokens")}
        recommended = forecaster.best(setting)
        assert recommended.peak_lr is not None
        assert recommended.batch_sequences is not None
        lost[by_law].append(
            regret(pair.longer, recommended.peak_lr.value, recommended.batch_sequences.value)
        )
    return {name: _summary(values) for name, values in lost.items()}


class Pair(NamedTuple):
    """All runs of one model size at two numbers of tokens."""

    index: int
    """Index of the longer setting."""
    shorter: RunTable
    longer: RunTable
    ratio: float
    """Tokens of the longer setting over those of the shorter one."""


def _pairs(table: RunTable) -> list[Pair]:
    """Return every pair of a shorter and a longer setting of the same model size."""
    setting_of_run = settings_of(table)
    parts = [table.subset(setting_of_run == index) for index in range(setting_of_run.max() + 1)]
    pairs = []
    for shorter in parts:
        for index, longer in enumerate(parts):
            is_same_size = shorter.values["parameters"][0] == longer.values["parameters"][0]
            ratio = float(longer.values["tokens"][0] / shorter.values["tokens"][0])
            if is_same_size and ratio > 1:
                pairs.append(Pair(index, shorter, longer, ratio))
    return pairs


def _summary(values: list[float]) -> dict[str, float]:
    """Return count, median, 90 % quantile and maximum of lost shares of the loss."""
    return {
        "count": len(values),
        "median": round(float(np.median(values)), 5),
        "high": round(float(np.quantile(values, 0.9)), 5),
        "worst": round(max(values), 5),
    }


def isoflop() -> list[dict[str, Any]]:
    """Forecast published losses of large budgets by the law of FLOPs, fitted to small budgets."""
    rows = []
    for upto, goal, came in ISOFLOP_GOALS:
        flops = []
        losses = []
        for point_flops, point_loss in ISOFLOPS:
            if point_flops <= upto:
                flops.append(point_flops)
                losses.append(point_loss)
        table = RunTable(
            source="isoflop",
            digest="",
            values={"flops": np.array(flops)},
            log_loss=np.log(losses),
            seeds=np.ones(len(flops), int),
            seed_deviation=None,
            decay=None,
            rows=len(flops),
            notes=(),
        )
        loss = Forecaster.of_table(table).best({"flops": goal}).loss
        row: dict[str, Any] = {"upto": upto, "goal": goal, "came": came}
        for name, value in dataclasses.asdict(loss).items():
            row[name] = round(value, 4)
        rows.append(row)
    return rows


def study(table: RunTable) -> dict[str, Any]:
    """Return the results of all parts of the study, which docs/evidence/forecasts.md shows."""
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
    """forecast: forecasts of settings that were not seen. law: file that `mupax plan` reads. study:
    results for the page."""
    table: tyro.conf.Positional[Path]
    """Published runs, as a CSV file."""


def main() -> None:
    """Fit the law to the table, and write the file of the chosen part."""
    options = tyro.cli(
        Options, prog="python -m scripts.studies.published_runs", description=__doc__
    )
    table = tables.read(options.table)
    if options.part == "forecast":
        path = FORECAST
        content: Any = forecast(table)
    elif options.part == "law":
        path = evidence.DENSE
        content = evidence.to_json(Forecaster.of_table(table))
    else:
        path = RESULT
        content = study(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(path, json.dumps(content, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
