"""`mupax plan --from TABLE.csv`: the best rate and batch of a size and length, and its loss, by a law of anybody's runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Repeated, UsageError
from mupax.train.config import joint
from mupax.train.studies import report
from mupax.train.studies.tables import table as tables
from mupax.train.studies.tables.forecast import Forecaster, Interval, Recommendation

PROG = "mupax plan"
FORMAT = "table plan 1"
FAR = 1.0
"""Octaves beyond the runs from which on a forecast gets a caution."""
PRIOR_SHARE = 0.7
"""Deviation that the runs leave, over the prior's, from which on they have said next to nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Plan a run from a table of runs, whoever trained them: best learning rate and batch, and the loss, each with a 90 % interval.

    The law is fitted to all rows at once. A table has a row a run, with the columns parameters, tokens (or flops alone) and loss, and
    peak_lr, batch_sequences, weight_decay and seed where it has them; --columns names them where the file calls them otherwise.
    """

    table: Annotated[Repeated, conf.arg(aliases=("--from",), metavar="TABLE")] = ()
    """A CSV, TSV or JSONL file of runs."""
    columns: Annotated[tuple[str, ...], conf.arg(metavar="NAME=COLUMN ...")] = ()
    """The file's name of a column, with a factor to its unit: `parameters=N tokens=D*1e9 peak_lr=lr`."""
    parameters: Annotated[str | None, conf.arg(metavar="N")] = None
    """Size of the model to plan, counted as the table counts: 1.07e9, 350m."""
    tokens: Annotated[str | None, conf.arg(metavar="N")] = None
    """Tokens to train on: 10b, 300m, 2e9."""
    flops: Annotated[str | None, conf.arg(metavar="N")] = None
    """Training FLOPs in place of both: the best size and length for them, counted as 6 N D (or the loss, of a table of FLOPs)."""
    peak_lr: Annotated[float | None, conf.arg(metavar="X")] = None
    """Say the loss at this peak rate, too."""
    batch_sequences: Annotated[float | None, conf.arg(metavar="N")] = None
    """And at this batch."""
    out: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the plan as JSON."""
    json: bool = False
    """Print it as JSON."""


def asks_for_table(argv: Sequence[str]) -> bool:
    """Return whether one of the words names a table behind `--from`."""
    words = ["", *argv]
    for flag, word in zip(words, argv, strict=False):
        name, _, value = word.partition("=")
        if flag in ("--from", "--table") and tables.is_table(word):
            return True
        if name in ("--from", "--table") and tables.is_table(value):
            return True
    return False


def main(argv: Sequence[str]) -> int:
    """Plan and print; raise TableError or UsageError for what does not fit."""
    options = command_line.parse(TablePlan, PROG, argv)
    if len(options.table) != 1:
        raise UsageError("a law is fitted to one table; write one --from FILE, with all runs in it")
    path = Path(options.table[0])
    request = _place_of(options)
    forecaster = Forecaster.of_table(tables.read(path, options.columns))
    content = _content(forecaster, options, request)
    if options.out is not None:
        report.write_json(options.out, content)
    if options.json:
        terminal.show(json.dumps(content, indent=1))
        return 0
    _print(content, options)
    return 0


def _place_of(options: TablePlan) -> dict[str, float]:
    """Return the size and length, or the FLOPs, that are asked for."""
    request: dict[str, float] = {}
    for name in ("parameters", "tokens", "flops"):
        text = getattr(options, name)
        if text is not None:
            request[name] = joint.amount(f"--{name}", text)
    if "flops" in request and len(request) > 1:
        raise UsageError("--flops stands in place of --parameters and --tokens; write either")
    if not request:
        raise UsageError(
            "say which run: write --parameters N --tokens N, as 1.07e9 and 10b, or --flops N"
        )
    for name in ("peak_lr", "batch_sequences"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; write a number above 0")
    return request


def _content(
    forecaster: Forecaster, options: TablePlan, request: dict[str, float]
) -> dict[str, Any]:
    """Return the plan as JSON has it."""
    fit = forecaster.fit
    place = dict(request)
    content: dict[str, Any] = {
        "format": FORMAT,
        "table": {
            "file": fit.table.source,
            "sha256": fit.table.digest,
            "rows": fit.table.rows,
            "used": len(fit.table.log_loss),
        },
    }
    if "flops" in request and "flops" not in fit.table.values:
        size, tokens, _ = forecaster.compute_optimal(request["flops"])
        place = {"parameters": size.value, "tokens": tokens.value}
        content["optimal"] = {
            "parameters": dataclasses.asdict(size),
            "tokens": dataclasses.asdict(tokens),
        }
    forecaster.check(place)
    best = forecaster.best(place)
    content["asked"] = request
    content["place"] = place
    content["best"] = _best_json(best)
    chosen = {
        name: value
        for name in ("peak_lr", "batch_sequences")
        if (value := getattr(options, name)) is not None
    }
    if chosen:
        forecaster.check({**place, **chosen})
        values = {**place, **_best_values(best), **chosen}
        content["at"] = {**chosen, "loss": dataclasses.asdict(forecaster.at(values))}
    content["next"] = [dataclasses.asdict(run) for run in forecaster.next_runs(place)]
    content["law"] = _law_json(forecaster)
    content["notes"] = list(fit.table.notes)
    content["cautions"] = _cautions(forecaster, place, chosen)
    return content


def _best_values(best: Recommendation) -> dict[str, float]:
    """Return the recommended rate and batch, as far as the table says them."""
    values = {}
    if best.peak_lr is not None:
        values["peak_lr"] = best.peak_lr.value
    if best.batch_sequences is not None:
        values["batch_sequences"] = best.batch_sequences.value
    return values


def _best_json(best: Recommendation) -> dict[str, Any]:
    """Return a recommendation as JSON has it."""
    intervals = {
        "peak_lr": best.peak_lr,
        "batch_sequences": best.batch_sequences,
        "loss": best.loss,
    }
    return {
        name: None if interval is None else dataclasses.asdict(interval)
        for name, interval in intervals.items()
    }


def _law_json(forecaster: Forecaster) -> dict[str, Any]:
    """Return the law's numbers, each with its deviation and whether the runs say more of it than its prior."""
    fit = forecaster.fit
    deviations = fit.covariance.diagonal() ** 0.5
    _, prior = fit.form.prior
    numbers = {
        name: {
            "value": round(float(value), 4),
            "deviation": round(float(deviation), 4),
            "of_runs": bool(deviation < PRIOR_SHARE * before),
        }
        for name, value, deviation, before in zip(
            fit.form.names, fit.numbers, deviations, prior, strict=True
        )
    }
    return {
        "numbers": numbers,
        "lowest_loss": round(fit.form.loss, 6),
        "middle_log2": dict(
            zip(fit.form.axes, (round(float(value), 4) for value in fit.form.centre), strict=True)
        ),
        "noise": {name: round(value, 5) for name, value in dataclasses.asdict(fit.noise).items()},
        "beyond_an_octave": {
            axis: round(deviation, 5) for axis, (deviation, _) in forecaster.beyond.items()
        },
    }


def _cautions(
    forecaster: Forecaster, place: dict[str, float], chosen: dict[str, float]
) -> list[str]:
    """Return what to know before the plan is believed, a sentence each."""
    fit = forecaster.fit
    cautions = []
    for axis, octaves in forecaster.distance(place).items():
        if octaves >= FAR:
            tried = fit.table.values[axis]
            cautions.append(
                f"{axis} {place[axis]:,.4g} is {2**octaves:.2g} times beyond the table's, which go from {tried.min():,.4g} to "
                f"{tried.max():,.4g}; the interval counts {forecaster.beyond[axis][0]:.2%} of the loss for each octave"
            )
    for name, value in chosen.items():
        tried = fit.table.values[name]
        if not tried.min() * 0.9 <= value <= tried.max() * 1.1:
            cautions.append(
                f"{name} {value:g} is outside of the table's, {tried.min():g} to {tried.max():g}"
            )
    for axis in place:
        if axis in fit.form.axes and forecaster.prior_share(place, axis) >= PRIOR_SHARE:
            cautions.append(
                f"the runs hardly say how the loss goes with {axis}: what is said of it is mostly the law's prior, whose width is in the "
                "interval"
            )
    grid = fit.grid(place)
    losses, _ = fit.log_loss(grid)
    for axis in ("peak_lr", "batch_sequences"):
        if axis in grid:
            value = grid[axis][int(losses.argmin())]
            if value <= grid[axis].min() * 1.01 or value >= grid[axis].max() * 0.99:
                cautions.append(
                    f"the best {axis} is at the end of the table's ({value:.4g}); a better one may be beyond it"
                )
    return cautions


def _print(content: dict[str, Any], options: TablePlan) -> None:
    """Print the conclusion, what to type next, the table and the cautions."""
    place = content["place"]
    best = content["best"]
    run = " and ".join(f"{value:,.4g} {axis}" for axis, value in place.items())
    settings = []
    if best["peak_lr"]:
        settings.append(f"a peak rate of {best['peak_lr']['value']:.3g}")
    if best["batch_sequences"]:
        settings.append(f"a batch of {best['batch_sequences']['value']:.0f} sequences")
    at = f" at {' and '.join(settings)}" if settings else ""
    loss = best["loss"]
    answer = f"{run}: the loss should be {loss['value']:.4f} [{loss['low']:.4f} to {loss['high']:.4f}]{at}"
    rows = [("", "value", "90 % interval", "from")]
    source = f"law over {content['table']['used']} of {content['table']['rows']} runs of {content['table']['file']}"
    for axis, interval in content.get("optimal", {}).items():
        budget = f"lowest loss at {content['asked']['flops']:.3g} FLOPs, 6 N D"
        rows.append((f"best {axis}", *_cells(interval, "{:,.4g}"), budget))
    for name, shown in (("peak_lr", "{:.3g}"), ("batch_sequences", "{:.0f}"), ("loss", "{:.4f}")):
        if best[name]:
            rows.append((name.replace("_", " "), *_cells(best[name], shown), source))
    if "at" in content:
        settings_text = ", ".join(
            f"{name} {value:g}" for name, value in content["at"].items() if name != "loss"
        )
        rows.append((f"loss at {settings_text}", *_cells(content["at"]["loss"], "{:.4f}"), source))
    sections = [report.Section(terminal.filled(rows))]
    if content["next"]:
        title = "runs that would narrow the interval of the loss most, each at a quarter of the FLOPs or less"
        sections.append(report.Section(terminal.filled(_next_rows(content["next"])), title))
    remarks = [f"note: {note}" for note in content["notes"]]
    remarks += [f"caution: {caution}" for caution in content["cautions"]]
    if options.out is not None:
        remarks.append(f"plan in {options.out}")
    report.Report([answer], sections=sections, remarks=remarks).show()


def _next_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a table of runs that would narrow the interval, names first."""
    rows = [("", "peak rate", "batch", "FLOPs", "interval after it")]
    for run in runs:
        values = run["values"]
        rows.append(
            (
                f"{values['parameters']:,.4g} parameters, {values['tokens']:,.4g} tokens",
                f"{values['peak_lr']:.3g}" if "peak_lr" in values else "",
                f"{values['batch_sequences']:.0f}" if "batch_sequences" in values else "",
                f"{run['flops']:.2g}",
                f"{run['half_width']:.0%} of now",
            )
        )
    return rows


def _cells(interval: dict[str, float] | Interval, shown: str) -> tuple[str, str]:
    """Return a value and its interval as two cells."""
    values = dataclasses.asdict(interval) if isinstance(interval, Interval) else interval
    return shown.format(
        values["value"]
    ), f"{shown.format(values['low'])} to {shown.format(values['high'])}"
