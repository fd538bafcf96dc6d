"""Numbers and tables of the report, from the records in docs/ and from the presets' rules.

Nothing is trained. Table cells are texts, because the template prints them as they are.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from mupax import presets
from mupax.presets.analysis.verdicts import wrong
from scripts import ROOT, harness
from scripts.check import mutations
from scripts.pages import leaderboard

DOCS = ROOT / "docs" / "evidence"
"""Folder of the records."""
LIMITS = ("head_dim", "heads", "depth")
"""Sizes that grow in the table of rules."""
OBSERVED = ("attention", "update query", "change residual", "change logits")
"""Observables in the table of theory and measurement; more are measured."""


def _record(name: str) -> Any:
    """Return the content of a JSON file in docs/evidence, also of a compressed one."""
    return harness.read_record(DOCS / name)


def _groups(rows_by_title: Mapping[str, list[list[str]]]) -> list[dict[str, Any]]:
    """Return groups of table rows as the template reads them."""
    return [{"title": title, "rows": rows} for title, rows in rows_by_title.items()]


def rules() -> list[list[str]]:
    """Return a row for every preset with a rule for Adam: its name, and a verdict per growing size.

    Theory gives the verdict from the rules alone: "right", or what goes wrong as the size grows.
    """
    rows = []
    for name in presets.PRESETS:
        try:
            verdicts = wrong(presets.get(name), "adam")
        except presets.PresetError:
            continue
        row = [name]
        for limit in LIMITS:
            names = sorted({entry.verdict for _, entry in verdicts[limit]})
            row.append(", ".join(names) or "right")
        rows.append(row)
    return rows


def theory() -> dict[str, Any]:
    """Return how many measured slopes agree with theory, and a table of both.

    A group of the table has the presets for one size that grows.
    """
    studies = _record("theory-and-measurement.json.gz")["studies"]
    counts: Counter[str] = Counter()
    groups: dict[str, list[list[str]]] = {}
    for study in studies:
        counts.update(slope["verdict"] for slope in study["observables"])
        slopes = {(slope["observable"], slope["step"]): slope for slope in study["observables"]}
        row = [study["preset"]]
        for name in OBSERVED:
            # Attention logits are compared at the start, changes after the first step.
            slope = slopes.get((name, 0 if name == "attention" else 1))
            if slope is None:
                row.append("")
            else:
                measured = _formatted(slope["slope"], "+.2f")
                row.append(f"{slope['predicted']:+.2f} | {measured}")
        row.append(study["verdict"])
        groups.setdefault(f"{study['grow']} grows", []).append(row)
    return {
        "counts": dict(counts),
        "slopes": counts.total(),
        "groups": _groups(groups),
        "observed": OBSERVED,
    }


def figures() -> dict[str, Any]:
    """Return counts of the papers' figures, and a table of predictions that do not reproduce."""
    records = [json.loads(path.read_text()) for path in sorted((DOCS / "figures").glob("*.json"))]
    num_claims = 0
    num_controls = 0
    num_reproduced = 0
    groups: dict[str, list[list[str]]] = {}
    for record in records:
        for row in record["rows"]:
            if row["predicted"] is None:
                continue
            if row["control"]:
                num_controls += 1
                continue
            num_claims += 1
            if row["verdict"].startswith("reproduces"):
                num_reproduced += 1
                continue
            cells = [row["what"], _interval(row, "measured", 3), row["verdict"]]
            groups.setdefault(record["title"], []).append(cells)
    return {
        "figures": len(records),
        "claims": num_claims,
        "reproduce": num_reproduced,
        "controls": num_controls,
        "against": _groups(groups),
        "cpu_minutes": round(sum(record["seconds"] for record in records) / 60),
    }


def transfer() -> list[dict[str, Any]]:
    """Return the leaderboard's tasks, each with a row for every preset.

    A row has the preset, drift, verdict, price, least loss and number of seeds.
    """
    groups: dict[str, list[list[str]]] = {}
    for row in leaderboard.rows():
        groups.setdefault(row.task, []).append(_transferred(row))
    return _groups(groups)


def _transferred(row: leaderboard.Row) -> list[str]:
    """Return a row of the leaderboard as table cells."""
    loss = "unknown" if row.loss is None else f"{row.loss:.3f}"
    drift = _interval(row.drift, "value", 2)
    price = _interval(row.price, "value", 3)
    return [row.preset, drift, row.verdict, price, loss, str(row.seeds)]


def quality() -> dict[str, Any]:
    """Return the tables of the study of tuned presets, one for each cell, and its training minutes.

    A row has an arm's losses at every size and its difference at the largest size.
    """
    paths = sorted((DOCS / "quality").glob("*/result.json"))
    records = [json.loads(path.read_text()) for path in paths]
    cells = []
    for record in records:
        rows = []
        for arm in record["arms"]:
            if not arm["ablation"]:
                rows.append(_arm(arm))
        sizes = [size["size"] for size in record["arms"][0]["sizes"]]
        cells.append({"axis": record["axis"], "sizes": sizes, "rows": rows})
    return {
        "cells": cells,
        "minutes": round(sum(record["train_seconds"] for record in records) / 60),
    }


def _arm(arm: Mapping[str, Any]) -> list[str]:
    """Return the table cells of an arm: label, mean loss at every size, and difference."""
    cells = [arm["label"]]
    for size in arm["sizes"]:
        losses = size["losses"]
        cells.append("diverged" if None in losses else f"{statistics.fmean(losses):.4f}")
    differences = arm["sizes"][-1]["reference_minus_this"]
    cells.append("" if differences is None else _mean_interval(differences))
    return cells


def forecasts() -> list[list[str]]:
    """Return a row for every folder of docs/evidence/forecasts.

    A row has the name, the number of forecasts with a trained run, the share inside the 90 %
    interval, and the median and the largest error.
    """
    rows = []
    for name, summary in _record("forecasts.json")["summary"].items():
        rows.append(
            [
                name,
                str(summary["came"]),
                # Without a trained run no forecast is inside or outside.
                _formatted(summary["inside90"] if summary["came"] else None, ".1%"),
                _formatted(summary["median_error"], ".2%"),
                _formatted(summary["largest_error"], ".2%"),
            ]
        )
    return rows


def wrong_rules() -> dict[str, Any]:
    """Return how many mutants of right rules change training, and how many of these are caught.

    The result also counts joint mutants, and checks of right presets with those that pass.
    """
    outcomes = list(itertools.chain.from_iterable(mutations.outcomes().values()))
    changing_by_column: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    num_by_activations = 0
    for outcome in outcomes:
        if outcome.trains_alike:
            continue
        changing_by_column[outcome.column] += 1
        if outcome.by is not None:
            caught[outcome.column] += 1
        if outcome.by_activations is not None:
            num_by_activations += 1
    columns = []
    for column, count in changing_by_column.items():
        columns.append([column, str(count), str(caught[column])])
    structures = _record("structures.json")["rows"]
    return {
        "tried": len(outcomes),
        "change": changing_by_column.total(),
        "caught": caught.total(),
        "by_activations": num_by_activations,
        "columns": columns,
        "joint": len(_record("joint-mutations.json")["mutants"]),
        "structures": len(structures),
        "structures_pass": sum(row["verdict"] == "pass" for row in structures),
    }


def robustness() -> list[list[str]]:
    """Return a row for every campaign of failures: name, cases, and cases that ended wrong."""
    kills = _record("kills.json")["runs"]
    operations = _record("operations.json")["runs"]
    processes = _record("processes.json")["rows"]
    faults = [row for row in _record("faults.json") if row["fired"]]
    corruptions = _record("corruptions.json.gz")["results"]
    num_fuzz_inputs = 0
    num_fuzz_failures = 0
    for row in _record("fuzz.json").values():
        num_fuzz_inputs += row["inputs"]
        num_fuzz_failures += row["tracebacks"] + row["hangs"] + row["large"]
    num_good = sum(bool(row["good"]) for row in corruptions)
    return [
        _campaign("runs killed at random moments", _kills(kills), _true(kills, "differences")),
        _campaign(
            "runs killed at a file operation", _kills(operations), _true(operations, "differences")
        ),
        _campaign("processes of a pod that fail", len(processes), _true(processes, "wrong")),
        _campaign("disks that are unwell", len(faults), _true(faults, "wrong")),
        _campaign("damaged checkpoints", len(corruptions), len(corruptions) - num_good),
        _campaign("broken files of every format", num_fuzz_inputs, num_fuzz_failures),
    ]


def _kills(runs: Iterable[Mapping[str, Any]]) -> int:
    """Return how often runs were killed in total."""
    return sum(len(run["kills"]) for run in runs)


def _true(rows: Iterable[Mapping[str, Any]], key: str) -> int:
    """Return the number of rows whose value at `key` is true or not empty."""
    return sum(bool(row[key]) for row in rows)


def _campaign(name: str, cases: int, wrong: int) -> list[str]:
    """Return the table cells of a campaign."""
    return [name, f"{cases:,}", f"{wrong:,}"]


def tuned() -> list[list[str]]:
    """Return a row for every tuned preset of the project: name, optimizer, rate and evidence."""
    from mupax.presets.tuned import find

    rows = []
    for path in sorted(find.FOLDER.glob("*.json")):
        preset = find.load(path)
        rate = f"{preset.optimizer['peak_lr']:.4g}"
        rows.append([preset.use, preset.optimizer["name"], rate, preset.evidence])
    return rows


def _mean_interval(differences: list[float]) -> str:
    """Return the mean of paired differences with half its 95 % interval by Student's t.

    One difference has no interval, and without differences the text is empty.
    """
    from scipy.stats import t

    n = len(differences)
    if n < 2:
        return f"{differences[0]:+.4f}" if differences else ""
    half_width = float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / n**0.5
    return f"{statistics.fmean(differences):+.4f} ± {half_width:.4f}"


def _interval(record: Mapping[str, Any], name: str, digits: int) -> str:
    """Return an estimate with its interval, if there is one.

    Args:
        record: Record with the estimate and the interval's ends `low` and `high`.
        digits: Number of digits after the decimal point, 2 or 3.
    """
    value = record[name]
    low = record["low"]
    high = record["high"]
    ends = ""
    if value is not None and low is not None and high is not None:
        ends = f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{_formatted(value, f'+.{digits}f')}{ends}"


def _formatted(value: float | None, spec: str) -> str:
    """Return a number in a format such as ".2%", or "unknown" for `None`."""
    return "unknown" if value is None else format(value, spec)


def gathered() -> dict[str, Any]:
    """Return all facts as the template reads them, by the names of the functions in this file."""
    from mupax import __version__

    return {
        "version": __version__,
        "limits": LIMITS,
        "rules": rules(),
        "theory": theory(),
        "figures": figures(),
        "transfer": transfer(),
        "quality": quality(),
        "forecasts": forecasts(),
        "wrong_rules": wrong_rules(),
        "robustness": robustness(),
        "tuned": tuned(),
    }
