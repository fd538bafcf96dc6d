"""Every number and table of the report, read from the records in docs/ and asked of the presets' rules; nothing is trained."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from mupax import presets
from mupax.presets.analysis.verdicts import wrong
from scripts import ROOT
from scripts.check import mutations
from scripts.pages import leaderboard

DOCS = ROOT / "docs" / "evidence"
LIMITS = ("head_dim", "heads", "depth")
OBSERVED = ("attention", "update query", "change residual", "change logits")
"""Observables that the table of theory and measurement shows, of those that are measured."""


def _record(name: str) -> Any:
    return json.loads((DOCS / name).read_text())


def _groups(rows: Mapping[str, list[list[str]]]) -> list[dict[str, Any]]:
    """Rows of a table under titles."""
    return [{"title": title, "rows": of_title} for title, of_title in rows.items()]


def rules() -> list[list[str]]:
    """Preset and, for each limit, what is wrong with it under Adam by its rules alone; of every preset with a rule for Adam."""
    rows = []
    for name in presets.PRESETS:
        try:
            verdicts = wrong(presets.get(name), "adam")
        except presets.PresetError:
            continue
        rows.append(
            [
                name,
                *(
                    ", ".join(sorted({entry.verdict for _, entry in verdicts[k]})) or "right"
                    for k in LIMITS
                ),
            ]
        )
    return rows


def theory() -> dict[str, Any]:
    """How many slopes agree, and the observables shown, by preset and axis."""
    studies = _record("theory-and-measurement.json")["studies"]
    counts = Counter(o["verdict"] for study in studies for o in study["observables"])
    groups: dict[str, list[list[str]]] = {}
    for study in studies:
        by_name = {(o["observable"], o["step"]): o for o in study["observables"]}
        cells = [by_name.get((name, 0 if name == "attention" else 1)) for name in OBSERVED]
        shown = ["" if o is None else f"{o['predicted']:+.2f} | {o['slope']:+.2f}" for o in cells]
        groups.setdefault(f"{study['grow']} grows", []).append(
            [study["preset"], *shown, study["verdict"]]
        )
    return {
        "counts": dict(counts),
        "slopes": counts.total(),
        "groups": _groups(groups),
        "observed": OBSERVED,
    }


def figures() -> dict[str, Any]:
    """What the papers' figures came to: predictions, those that reproduce, controls, and every prediction that does not."""
    records = [json.loads(path.read_text()) for path in sorted((DOCS / "figures").glob("*.json"))]
    rows = [
        (record["title"], row)
        for record in records
        for row in record["rows"]
        if row["predicted"] is not None
    ]
    claims = [(title, row) for title, row in rows if not row["control"]]
    against = [(title, row) for title, row in claims if not row["verdict"].startswith("reproduces")]
    groups: dict[str, list[list[str]]] = {}
    for title, row in against:
        groups.setdefault(title, []).append(
            [row["what"], _interval(row, "measured", 3), row["verdict"]]
        )
    return {
        "figures": len(records),
        "claims": len(claims),
        "reproduce": len(claims) - len(against),
        "controls": len(rows) - len(claims),
        "against": _groups(groups),
        "cpu_minutes": round(sum(record["seconds"] for record in records) / 60),
    }  # fmt: skip


def transfer() -> list[dict[str, Any]]:
    """The leaderboard's tasks, each with its rows: preset, drift, verdict, price, least loss, seeds."""
    groups: dict[str, list[list[str]]] = {}
    for row in leaderboard.rows():
        groups.setdefault(row.task, []).append(_transferred(row))
    return _groups(groups)


def _transferred(row: leaderboard.Row) -> list[str]:
    loss = "unknown" if row.loss is None else f"{row.loss:.3f}"
    drift, price = _interval(row.drift, "value", 2), _interval(row.price, "value", 3)
    return [row.preset, drift, row.verdict, price, loss, str(row.seeds)]


def quality() -> dict[str, Any]:
    """Cells with their losses of presets tuned once at the base beside `sp` tuned anew at every size, and the largest size's difference."""
    records = [
        json.loads(path.read_text()) for path in sorted((DOCS / "quality").glob("*/result.json"))
    ]
    cells = [
        {
            "axis": record["axis"],
            "sizes": [size["size"] for size in record["arms"][0]["sizes"]],
            "rows": [_arm(arm) for arm in record["arms"] if not arm["ablation"]],
        }
        for record in records
    ]
    return {
        "cells": cells,
        "minutes": round(sum(record["train_seconds"] for record in records) / 60),
    }


def _arm(arm: Mapping[str, Any]) -> list[str]:
    losses = [
        "diverged" if None in one["losses"] else f"{statistics.fmean(one['losses']):.4f}"
        for one in arm["sizes"]
    ]
    apart = arm["sizes"][-1]["reference_minus_this"]
    return [arm["label"], *losses, "" if apart is None else _t(apart)]


def forecasts() -> list[list[str]]:
    """Of every backtest: forecasts, share inside the 90 % interval, median and largest error."""
    return [
        [
            name,
            str(each["came"]),
            f"{each['inside90']:.1%}",
            f"{each['median_error']:.2%}",
            f"{each['largest_error']:.2%}",
        ]
        for name, each in _record("forecasts.json")["summary"].items()
    ]


def wrong_rules() -> dict[str, Any]:
    """Mutants of right rules: how many change training, how many of those the check catches, by column."""
    every = [one for study in mutations.outcomes().values() for one in study]
    training = [one for one in every if not one.trains_alike]
    columns = Counter(one.column for one in training)
    caught = Counter(one.column for one in training if one.by is not None)
    joint = _record("joint-mutations.json")["mutants"]
    return {
        "tried": len(every),
        "change": len(training),
        "caught": caught.total(),
        "by_activations": sum(one.by_activations is not None for one in training),
        "columns": [[column, str(n), str(caught[column])] for column, n in columns.items()],
        "joint": len(joint),
        "structures": len(rows := _record("structures.json")["rows"]),
        "structures_pass": sum(row["verdict"] == "pass" for row in rows),
    }


def robustness() -> list[list[str]]:
    """Campaign, cases, and those that ended wrong."""
    kills, operations = _record("kills.json")["runs"], _record("operations.json")["runs"]
    processes = _record("processes.json")["rows"]
    faults = [row for row in _record("faults.json") if row["fired"]]
    corruptions, fuzz = _record("corruptions.json")["results"], _record("fuzz.json")
    return [
        _campaign("runs killed at random moments", _kills(kills), sum(bool(run["differences"]) for run in kills)),
        _campaign("runs killed at a file operation", _kills(operations), sum(bool(r["differences"]) for r in operations)),
        _campaign("processes of a pod that fail", len(processes), sum(bool(row["wrong"]) for row in processes)),
        _campaign("disks that are unwell", len(faults), sum(bool(row["wrong"]) for row in faults)),
        _campaign("damaged checkpoints", len(corruptions), sum(not row["good"] for row in corruptions)),
        _campaign(
            "broken files of every format", sum(row["inputs"] for row in fuzz.values()),
            sum(row["tracebacks"] + row["hangs"] + row["large"] for row in fuzz.values()),
        ),
    ]  # fmt: skip


def _kills(runs: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(run["kills"]) for run in runs)


def _campaign(name: str, cases: int, wrong: int) -> list[str]:
    return [name, f"{cases:,}", f"{wrong:,}"]


def tuned() -> list[list[str]]:
    """Tuned presets that come with the project: name, optimizer, rate, evidence."""
    from mupax.presets.tuned import find

    each = [find.load(path) for path in sorted(find.FOLDER.glob("*.json"))]
    return [[p.use, p.optimizer["name"], f"{p.optimizer['peak_lr']:.4g}", p.evidence] for p in each]


def _t(differences: list[float]) -> str:
    """Mean of paired differences and half its 95 % interval by Student's t."""
    from scipy.stats import t

    n = len(differences)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / n**0.5
    return f"{statistics.fmean(differences):+.4f} ± {half:.4f}"


def _interval(of: Mapping[str, Any], name: str, digits: int) -> str:
    value, low, high = of[name], of["low"], of["high"]
    if value is None:
        return "unknown"
    ends = "" if low is None or high is None else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{value:+.{digits}f}{ends}"


def gathered() -> dict[str, Any]:
    """All of it, as JSON that the template reads."""
    from mupax import __version__

    parts = (rules, theory, figures, transfer, quality, forecasts, wrong_rules, robustness, tuned)
    return {"version": __version__, "limits": LIMITS, **{part.__name__: part() for part in parts}}
