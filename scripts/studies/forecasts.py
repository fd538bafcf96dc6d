"""Board of all forecasts with their outcomes, for docs/evidence/forecasts.json and forecasts.md.

    python -m scripts.studies.forecasts

A folder of docs/evidence/forecasts/ holds forecasts.json and, once its runs were trained,
outcomes/points.jsonl. The board also lists forecasts in hindsight: a law that is fitted to a
committed transfer study without its largest size forecasts this size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mupax import disk
from mupax.train.studies.forecast import points, record
from mupax.train.studies.forecast.fitted import NoLaw, fitted
from mupax.train.studies.forecast.predict import predict
from mupax.train.studies.plan import score
from mupax.train.studies.sweep.rows import has_rows
from mupax.train.studies.transfer.fit import fit
from scripts import ROOT, harness
from scripts.pages import markdown

DOCS = ROOT / "docs" / "evidence"
COPIED_FIELDS = ("date", "what", "preset", "scale", "beyond", "prediction", "digest", "metric")
"""Fields of a forecast that the board repeats."""
ERROR = "measured over forecast, less 1"
"""Heading of a column of errors."""


def collected(folder: Path) -> list[dict[str, Any]]:
    """Return every forecast below a folder, with its outcome, or `None` before its run was trained.

    Args:
        folder: docs/evidence/forecasts, or a folder of the same layout.

    Raises:
        ForecastError: a forecast's content does not match its digest.
    """
    board = []
    for path in sorted(folder.glob("*/forecasts.json")):
        study = path.parent
        trained = points.load([study / "outcomes"]) if has_rows(study / "outcomes") else []

        for content in json.loads(path.read_text()):
            if record.digest(content) != content["digest"]:
                raise record.ForecastError(
                    f"{study.name}: the forecast of {content['what']} is not as it was written"
                )
            outcomes = score.of_points(content, trained)
            outcome = score.score(content, outcomes[0]) if outcomes else None
            entry: dict[str, Any] = {"from": study.name}
            for field in COPIED_FIELDS:
                entry[field] = content[field]
            entry["outcome"] = outcome
            board.append(entry)
    return board


def hindsight(folder: Path) -> list[dict[str, Any]]:
    """Forecast the largest size of each transfer study from its smaller sizes, and score it.

    Args:
        folder: docs/evidence/transfer, or a folder of the same layout.

    Returns:
        One record for each study and preset. A study that supports no law has the reason as `none`.
    """
    rows = []
    for path in sorted(folder.glob("*/transfer.json")):
        for study in points.load([path.parent]):
            *smaller, largest = study.settings
            row: dict[str, Any] = {
                "study": path.parent.name,
                "preset": study.label,
                "parameters": largest.parameters,
            }
            best = fit(largest.curve, largest.curve.first)
            try:
                law = fitted(replace(study, settings=tuple(smaller)))
                prediction = predict(law, largest.config)
            except NoLaw as error:
                # The study's name is in the row.
                reason = str(error).partition(": ")[2]
                rows.append({**row, "none": reason})
                continue

            loss = prediction.loss.to_json()
            outcome = score.score({"prediction": {"loss": loss}}, score.Outcome(best.loss, 0, None))
            rate = None
            if prediction.log2_lr is not None:
                rate = {**prediction.log2_lr.to_json(2), "came": round(best.optimum, 2)}
            rows.append({**row, "loss": loss, "log2_lr": rate, "outcome": outcome})
    return rows


def summary(board: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count forecasts and outcomes, and return the shares inside their intervals and the errors.

    Args:
        board: entries as `collected` returns them.
    """
    errors = []
    num_inside90 = 0
    num_inside50 = 0
    for entry in board:
        outcome = entry["outcome"]
        if outcome:
            errors.append(abs(outcome["error"]))
            num_inside90 += outcome["inside90"]
            num_inside50 += outcome["inside50"]
    count = max(1, len(errors))
    return {
        "forecasts": len(board),
        "came": len(errors),
        "inside90": round(num_inside90 / count, 3),
        "inside50": round(num_inside50 / count, 3),
        "median_error": round(float(np.median(errors)), 5) if errors else None,
        "largest_error": round(max(errors), 5) if errors else None,
    }


def document(content: dict[str, Any]) -> str:
    """Return the board as Markdown: three tables and the studies without a law.

    Args:
        content: Record with `summary`, `forecasts` and `hindsight`.
    """
    lines = [
        _totals(content["summary"]),
        "",
        "Outcomes outside their 90 % interval (all: `docs/evidence/forecasts.json`):",
        "",
        _misses(content["forecasts"]),
        "",
        "### In hindsight",
        "",
        _hindsight_summary(content["hindsight"]),
    ]
    return "\n".join(lines)


def _totals(summaries: dict[str, dict[str, Any]]) -> str:
    """Return the table with one line for each folder of forecasts."""
    head = ["forecasts of", "made", "trained", "inside 90 %", "inside 50 %"]
    rows = [[*head, "median size of the error", "largest"]]
    for name, totals in summaries.items():
        cells = [name, str(totals["forecasts"]), str(totals["came"])]
        if totals["came"]:
            cells += [f"{totals[key]:.1%}" for key in ("inside90", "inside50")]
            cells += [f"{totals[key]:.2%}" for key in ("median_error", "largest_error")]
        else:
            cells += ["", "", "", ""]
        rows.append(cells)
    return markdown.table(rows)


def _misses(forecasts: Sequence[dict[str, Any]]) -> str:
    """Return the table of forecasts whose 90 % interval did not hold the outcome."""
    rows = [["forecast of", "run", "loss", "90 %", "measured", ERROR]]
    for entry in forecasts:
        outcome = entry["outcome"]
        if not outcome or outcome["inside90"]:
            continue
        loss = entry["prediction"]["loss"]
        measured = "diverged"
        error = ""
        if outcome["loss"] is not None:
            measured = f"{outcome['loss']:.4f}"
            error = f"{outcome['error']:+.2%}"
        rows.append(
            [
                entry["from"],
                entry["what"].partition(", at")[0],
                f"{loss['value']:.4f}",
                f"{loss['low90']:.4f} to {loss['high90']:.4f}",
                measured,
                error,
            ]
        )
    return markdown.table(rows)


def _hindsight_summary(forecasts: Sequence[dict[str, Any]]) -> str:
    """Return a paragraph on how many losses and best rates are inside their intervals."""
    judged = [row for row in forecasts if "none" not in row]
    outside = [row for row in judged if not row["outcome"]["inside90"]]
    rates = [row["log2_lr"] for row in judged if row["log2_lr"]]
    inside = sum(rate["low90"] <= rate["came"] <= rate["high90"] for rate in rates)
    misses = [
        f"{row['study']} under `{row['preset']}` ({row['outcome']['error']:+.2%})"
        for row in outside
    ]
    errors = [abs(row["outcome"]["error"]) for row in judged]
    return (
        "In each transfer study that supports a law, a law fitted to all sizes but the largest "
        f"forecasts the largest. {len(judged) - len(outside)} of {len(judged)} losses and "
        f"{inside} of {len(rates)} best learning rates are inside their 90 % intervals. The median "
        f"error of the losses is {np.median(errors):.2%}. Outside: {', '.join(misses) or 'none'}."
    )


def page(text: str, content: dict[str, Any]) -> str:
    """Return the text of docs/evidence/forecasts.md with its board replaced.

    Args:
        text: Text of the page, which has the markers of `board`.
        content: Record with `summary`, `forecasts` and `hindsight`.
    """
    return markdown.replaced(text, "board", f"\n{document(content)}\n")


@dataclass(frozen=True)
class Options:
    """Flags of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Score every forecast with a trained run, write the record and the page, and return 0."""
    harness.parse(Options, argv)
    board = collected(DOCS / "forecasts")
    summaries = {}
    for name in dict.fromkeys(entry["from"] for entry in board):
        summaries[name] = summary([entry for entry in board if entry["from"] == name])
    content = {"summary": summaries, "forecasts": board, "hindsight": hindsight(DOCS / "transfer")}

    disk.write_whole(DOCS / "forecasts.json", disk.json_text(content, indent=1) + "\n")
    disk.write_whole(DOCS / "forecasts.md", page((DOCS / "forecasts.md").read_text(), content))
    for name, totals in summaries.items():
        print(f"{name}: {totals}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
