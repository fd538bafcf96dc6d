"""Command `mupax plan --from TABLE.csv`, which plans a run by a law of anybody's runs.

A law of the loss is fitted to the runs of the table. The command prints the best learning rate and
batch for a model size and length of training, and the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro import conf

from mupax import command_line, disk, terminal
from mupax.command_line import Repeated, UsageError
from mupax.mappings import drop_keys
from mupax.train.config import joint
from mupax.train.config.checks import check_outputs
from mupax.train.studies import report
from mupax.train.studies.tables import table as tables
from mupax.train.studies.tables.forecast import Forecaster, Recommendation

PROG = "mupax plan"
FORMAT = "table plan 1"
SEARCHED_AXES = ("peak_lr", "batch_sequences")
"""Axes that the best run is searched over."""
FAR = 1.0
"""Distance beyond the runs of a table, in octaves, from which on a plan gets a caution."""
PRIOR_SHARE = 0.7
"""Ratio of fitted to prior standard deviation below which the runs determine a number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Plan a run from a table of runs, whoever trained them.

    Prints the best learning rate and batch, and the loss, each with a 90 % interval. The law is
    fitted to all rows at once. A table has a row for each run, with the columns parameters, tokens
    (or flops alone) and loss, and optionally peak_lr, batch_sequences, weight_decay and seed. Use
    --columns if the file has other names for them.
    """

    table: Annotated[Repeated, conf.arg(aliases=("--from",), metavar="TABLE")] = ()
    """A CSV, TSV or JSONL file of runs."""
    columns: Annotated[tuple[str, ...], conf.arg(metavar="NAME=COLUMN ...")] = ()
    """The file's names of columns, each with a factor to its unit if needed:
    `parameters=N tokens=D*1e9 peak_lr=lr`."""
    parameters: Annotated[str | None, conf.arg(metavar="N")] = None
    """Size of the model to plan, counted as the table counts: 1.07e9, 350m."""
    tokens: Annotated[str | None, conf.arg(metavar="N")] = None
    """Tokens to train on: 10b, 300m, 2e9."""
    flops: Annotated[str | None, conf.arg(metavar="N")] = None
    """Training FLOPs in place of both, counted as 6 N D: plan the best size and length for them.
    For a table of FLOPs, the FLOPs of the run to plan."""
    peak_lr: Annotated[float | None, conf.arg(metavar="X")] = None
    """Also print the loss at this peak rate."""
    batch_sequences: Annotated[float | None, conf.arg(metavar="N")] = None
    """Also print the loss at this batch, in sequences."""
    out: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the plan as JSON."""
    json: bool = False
    """Print the plan as JSON."""


def asks_for_table(argv: Sequence[str]) -> bool:
    """Return True if the value of --from or --table has the ending of a table of runs, as .csv.

    The value may be the next word or come after "=".
    """
    # Asked before the words are parsed, because a table and a recipe have different flags.
    previous_words = ["", *argv]
    for previous, word in zip(previous_words, argv, strict=False):
        if previous in ("--from", "--table") and tables.is_table(word):
            return True
        name, _, value = word.partition("=")
        if name in ("--from", "--table") and tables.is_table(value):
            return True
    return False


def main(argv: Sequence[str]) -> int:
    """Plan a run from a table, print the plan as text or JSON, and write it to `--out`. Return 0.

    Raises:
        UsageError, ConfigError: The flags do not name exactly one table and one run, or `--out` cannot
            be written.
        TableError: No law can be fitted to the table, or the run cannot be forecast from it.
        DiskError: The table cannot be read, or the plan cannot be written.
    """
    options = command_line.parse(TablePlan, PROG, argv)
    check_outputs(options, "out")
    if len(options.table) != 1:
        raise UsageError("a law is fitted to one table; write one --from FILE, with all runs in it")
    path = Path(options.table[0])
    request = _request(options)
    forecaster = Forecaster.of_table(tables.read(path, options.columns))
    content = _content(forecaster, options, request)
    if options.out is not None:
        report.write_json(options.out, content)
    if options.json:
        terminal.show(disk.json_text(content, indent=1))
        return 0
    _print(content, options)
    return 0


def _request(options: TablePlan) -> dict[str, float]:
    """Return the size and length, or the FLOPs, of the run that the user wants to plan, by name.

    Keys are "parameters" and "tokens", or "flops". Only one of the first two may be given; whether
    the law needs both is checked later.

    Raises:
        UsageError: The options name no run or two runs, or a learning rate or batch is not above 0.
        ConfigError: A size, length or budget is no number above 0.
    """
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

    for name in SEARCHED_AXES:
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; write a number above 0")
    return request


def _content(
    forecaster: Forecaster, options: TablePlan, request: dict[str, float]
) -> dict[str, Any]:
    """Return the plan as plain values for JSON: best rate, batch and loss, next runs and law.

    A budget of FLOPs is turned into the best size and tokens first, unless the table has FLOPs
    alone. If the options have a learning rate or batch, the entry "at" has the loss with it. The
    entry "next" has the runs that would narrow the forecast.

    Args:
        request: Parameters and tokens, or FLOPs, from `_request`.

    Raises:
        TableError: The run cannot be forecast from the table.
    """
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
    # If a table has FLOPs but no sizes and tokens, they are an axis of the law. Otherwise they are
    # a budget, which is split into size and tokens.
    if "flops" in request and "flops" not in fit.table.values:
        size, tokens, _ = forecaster.compute_optimal(request["flops"])
        place = {"parameters": size.value, "tokens": tokens.value}
        content["optimal"] = {
            "parameters": dataclasses.asdict(size),
            "tokens": dataclasses.asdict(tokens),
        }

    # The law has a value everywhere, so runs that the table says nothing of are refused first.
    forecaster.check(place)
    best = forecaster.best(place)
    content["asked"] = request
    content["place"] = place
    content["best"] = _best_json(best)

    chosen = _chosen(options)
    if chosen:
        forecaster.check({**place, **chosen})
        values = {**place, **_best_values(best), **chosen}
        content["at"] = {**chosen, "loss": dataclasses.asdict(forecaster.loss_at(values))}

    content["next"] = [dataclasses.asdict(run) for run in forecaster.next_runs(place)]
    content["law"] = _law_json(forecaster)
    content["notes"] = list(fit.table.notes)
    content["cautions"] = _cautions(forecaster, place, chosen)
    return content


def _chosen(options: TablePlan) -> dict[str, float]:
    """Return the values of `--peak-lr` and `--batch-sequences`, as far as given, by name."""
    chosen: dict[str, float] = {}
    for name in SEARCHED_AXES:
        value = getattr(options, name)
        if value is not None:
            chosen[name] = value
    return chosen


def _best_values(best: Recommendation) -> dict[str, float]:
    """Return the best learning rate and batch by name. One that is `None` is left out."""
    values = {}
    if best.peak_lr is not None:
        values["peak_lr"] = best.peak_lr.value
    if best.batch_sequences is not None:
        values["batch_sequences"] = best.batch_sequences.value
    return values


def _best_json(best: Recommendation) -> dict[str, Any]:
    """Return the best rate and batch, and the loss, as plain values for JSON.

    Each is an interval with its ends and value, or `None`.
    """
    intervals = {
        "peak_lr": best.peak_lr,
        "batch_sequences": best.batch_sequences,
        "loss": best.loss,
    }
    content = {}
    for name, interval in intervals.items():
        if interval is None:
            content[name] = None
        else:
            content[name] = dataclasses.asdict(interval)
    return content


def _law_json(forecaster: Forecaster) -> dict[str, Any]:
    """Return the fitted numbers and the noise of a law as rounded values for JSON.

    Each number has a value, a standard deviation, and `of_runs`. The last is true if the deviation
    is below `PRIOR_SHARE` times that of the prior, so that the runs and not the prior determine the
    number.
    """
    fit = forecaster.fit
    deviations = fit.covariance.diagonal() ** 0.5
    _, priors = fit.form.prior
    numbers = {}
    for name, value, deviation, prior in zip(
        fit.form.names, fit.numbers, deviations, priors, strict=True
    ):
        numbers[name] = {
            "value": round(float(value), 4),
            "deviation": round(float(deviation), 4),
            # `json` cannot write the bool of NumPy.
            "of_runs": bool(deviation < PRIOR_SHARE * prior),
        }

    middle = [round(float(value), 4) for value in fit.form.centre]
    noise = dataclasses.asdict(fit.noise)
    beyond = forecaster.beyond
    rounded_noise = {}
    for name, value in noise.items():
        rounded_noise[name] = round(value, 5)
    return {
        "numbers": numbers,
        "lowest_loss": round(fit.form.loss, 6),
        "middle_log2": dict(zip(fit.form.axes, middle, strict=True)),
        "noise": rounded_noise,
        "beyond_an_octave": {axis: round(deviation, 5) for axis, (deviation, _) in beyond.items()},
    }


def _cautions(
    forecaster: Forecaster, place: dict[str, float], chosen: dict[str, float]
) -> list[str]:
    """Return reasons to doubt the plan, a sentence each.

    There are four: the planned run is far beyond the runs of the table; the runs say little about
    an axis; a learning rate or batch of the user is outside of the table's range; and the best one
    is at an end of this range.

    Args:
        place: Planned run: parameters and tokens (or FLOPs), by their names in `COLUMNS`.
        chosen: Peak learning rate and batch that the user named, if any, by their names in
            `COLUMNS`.
    """
    fit = forecaster.fit
    cautions = []
    for axis, octaves in forecaster.distance(place).items():
        if octaves >= FAR:
            tried = fit.table.values[axis]
            deviation, _ = forecaster.beyond[axis]
            cautions.append(
                f"{axis} {place[axis]:,.4g} is {2**octaves:.2g} times beyond the table's, which "
                f"go from {tried.min():,.4g} to {tried.max():,.4g}; the interval counts "
                f"{deviation:.2%} of the loss for each octave"
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
                f"the runs hardly show how the loss depends on {axis}: the forecast mostly follows "
                "the law's prior, whose width is in the interval"
            )

    grid = fit.grid(place)
    losses, _ = fit.log_loss(grid)
    best = int(losses.argmin())
    for axis in SEARCHED_AXES:
        if axis not in grid:
            continue
        column = grid[axis]
        if column[best] <= column.min() * 1.01 or column[best] >= column.max() * 0.99:
            cautions.append(
                f"the best {axis} is at the end of the table's ({column[best]:.4g}); a better one "
                "may be beyond it"
            )
    return cautions


def _print(content: dict[str, Any], options: TablePlan) -> None:
    """Print the conclusion, the tables of the plan and of the next runs, and the remarks.

    Args:
        content: Plan as `_content` returns it.
    """
    sections = [report.Section(terminal.filled(_plan_rows(content)))]
    if content["next"]:
        title = (
            "runs that would narrow the interval of the loss most, each at a quarter of the FLOPs "
            "or less"
        )
        sections.append(report.Section(terminal.filled(_next_rows(content["next"])), title))

    remarks = [f"note: {note}" for note in content["notes"]]
    remarks += [f"caution: {caution}" for caution in content["cautions"]]
    if options.out is not None:
        remarks.append(f"plan in {options.out}")
    report.Report([_conclusion(content)], sections=sections, remarks=remarks).show()


def _conclusion(content: dict[str, Any]) -> str:
    """Return a sentence with the planned run, its loss and its best rate and batch."""
    best = content["best"]
    run = " and ".join(f"{value:,.4g} {axis}" for axis, value in content["place"].items())
    settings = []
    if best["peak_lr"]:
        settings.append(f"a peak rate of {best['peak_lr']['value']:.3g}")
    if best["batch_sequences"]:
        settings.append(f"a batch of {best['batch_sequences']['value']:.0f} sequences")

    loss = best["loss"]
    interval = f"[{loss['low']:.4f} to {loss['high']:.4f}]"
    conclusion = f"{run}: the loss should be {loss['value']:.4f} {interval}"
    if settings:
        conclusion += f" at {' and '.join(settings)}"
    return conclusion


def _plan_rows(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of planned values as text: a row of headings, then a row per value.

    A row has the value, its interval and where it comes from.
    """
    rows: list[tuple[str, ...]] = [("", "value", "90 % interval", "from")]
    table = content["table"]
    # Fewer runs than rows: rows that differ in seed alone are one run, and some are left out.
    source = f"law over {table['used']} runs from the {table['rows']} rows of {table['file']}"
    for axis, interval in content.get("optimal", {}).items():
        budget = f"lowest loss at {content['asked']['flops']:.3g} FLOPs, 6 N D"
        rows.append((f"best {axis}", *_cells(interval, ",.4g"), budget))

    specs = {"peak_lr": ".3g", "batch_sequences": ".0f", "loss": ".4f"}
    for name, spec in specs.items():
        interval = content["best"][name]
        if interval:
            rows.append((name.replace("_", " "), *_cells(interval, spec), source))

    if "at" in content:
        chosen = drop_keys(content["at"], ("loss",))
        settings = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
        rows.append((f"loss at {settings}", *_cells(content["at"]["loss"], ".4f"), source))
    return rows


def _next_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table of runs that would narrow the forecast: a row of headings, then the runs.

    Args:
        runs: Fields of `NextRun` of each run.
    """
    rows = [("", "peak rate", "batch", "FLOPs", "interval after it")]
    for run in runs:
        values = run["values"]
        rate = f"{values['peak_lr']:.3g}" if "peak_lr" in values else ""
        batch = f"{values['batch_sequences']:.0f}" if "batch_sequences" in values else ""
        rows.append(
            (
                f"{values['parameters']:,.4g} parameters, {values['tokens']:,.4g} tokens",
                rate,
                batch,
                f"{run['flops']:.2g}",
                f"{run['half_width']:.0%} of now",
            )
        )
    return rows


def _cells(interval: dict[str, float], spec: str) -> tuple[str, str]:
    """Return a value and its interval, "LOW to HIGH", as two texts.

    Args:
        interval: Fields of an `Interval`.
        spec: Format specification of a number, such as `.4f`.
    """
    value = format(interval["value"], spec)
    low = format(interval["low"], spec)
    high = format(interval["high"], spec)
    return value, f"{low} to {high}"
