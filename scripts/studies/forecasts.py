"""Board of forecasts and their outcomes: writes docs/evidence/forecasts.json and its part of docs/evidence/forecasts.md.

    python -m scripts.studies.forecasts

A folder of docs/evidence/forecasts/ has forecasts.json and, where their runs were trained, outcomes/points.jsonl. Beside them stands what the
law makes of the committed transfer studies: fitted without their largest size, it is asked for that one. That is hindsight, as
those outcomes were known, and counts for no more.
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
from scripts.pages.markdown import replaced

DOCS = ROOT / "docs" / "evidence"
SHORT = ("date", "what", "preset", "scale", "beyond", "prediction", "digest", "metric")


def collected(folder: Path) -> list[dict[str, Any]]:
    """Every forecast in a folder of folders, each with its outcome where it has come.

    Args:
        folder: docs/evidence/forecasts.

    Raises:
        ForecastError: a forecast is not as it was written.
    """
    board = []
    for place in sorted(path.parent for path in folder.glob("*/forecasts.json")):
        came = points.load([place / "outcomes"]) if has_rows(place / "outcomes") else []
        for content in json.loads((place / "forecasts.json").read_text()):
            if record.digest(content) != content["digest"]:
                raise record.ForecastError(
                    f"{place.name}: the forecast of {content['what']} is not as it was written"
                )
            outcomes = score.of_points(content, came)
            outcome = score.score(content, outcomes[0]) if outcomes else None
            board.append(
                {"from": place.name, **{name: content[name] for name in SHORT}, "outcome": outcome}
            )
    return board


def hindsight(folder: Path) -> list[dict[str, Any]]:
    """The largest size of each committed transfer study, as the law of the others has it.

    Args:
        folder: docs/evidence/transfer.
    """
    rows = []
    for place in sorted(path.parent for path in folder.glob("*/transfer.json")):
        for study in points.load([place]):
            *smaller, largest = study.settings
            row: dict[str, Any] = {
                "study": place.name,
                "preset": study.label,
                "parameters": largest.parameters,
            }
            best = fit(largest.curve, largest.curve.first)
            try:
                prediction = predict(
                    fitted(replace(study, settings=tuple(smaller))), largest.config
                )
            except NoLaw as error:
                rows.append({**row, "none": str(error).partition(": ")[2].partition(" (")[0]})
                continue
            content = {"prediction": {"loss": prediction.loss.to_json()}}
            outcome = score.score(content, score.Outcome(best.loss, 0, None))
            rate = prediction.log2_lr and {
                **prediction.log2_lr.to_json(2),
                "came": round(best.optimum, 2),
            }
            rows.append({**row, **content["prediction"], "log2_lr": rate, "outcome": outcome})
    return rows


def summary(board: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many forecasts there are, how many came, how many of these inside, and how far off.

    Args:
        board: of `collected`.
    """
    came = [entry["outcome"] for entry in board if entry["outcome"]]
    errors = [abs(outcome["error"]) for outcome in came]
    count = max(1, len(came))
    return {
        "forecasts": len(board),
        "came": len(came),
        "inside90": round(sum(outcome["inside90"] for outcome in came) / count, 3),
        "inside50": round(sum(outcome["inside50"] for outcome in came) / count, 3),
        "median_error": round(float(np.median(errors)), 5) if errors else None,
        "largest_error": round(max(errors), 5) if errors else None,
    }


def document(content: dict[str, Any]) -> str:
    """The board as it stands in the page.

    Args:
        content: of docs/evidence/forecasts.json.
    """
    lines = [
        "| forecasts of | made | came | inside 90 % | inside 50 % | median error | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of_folder in content["summary"].items():
        if of_folder["came"]:
            shares = [f"{of_folder[key]:.1%}" for key in ("inside90", "inside50")]
            errors = [f"{of_folder[key]:.2%}" for key in ("median_error", "largest_error")]
        else:
            shares = errors = ["", ""]
        lines.append(
            f"| {name} | {of_folder['forecasts']} | {of_folder['came']} | {' | '.join([*shares, *errors])} |"
        )
    lines += _misses(content["forecasts"])
    lines += [
        "",
        "### In hindsight",
        "",
        "The largest size of the committed transfer studies, as the law of the other three has it.",
        "",
    ]
    lines += [
        "| study | preset | parameters | loss | 90 % | came | error | best rate, 90 % | came |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in content["hindsight"]:
        if "none" in row:
            continue
        start = f"| {row['study']} | `{row['preset']}` | {row['parameters']:,} |"
        loss, outcome, rate = row["loss"], row["outcome"], row["log2_lr"]
        where = "" if outcome["inside90"] else ", **outside**"
        cells = f"{loss['value']:.3f} | {loss['low90']:.3f} to {loss['high90']:.3f} | {outcome['loss']:.3f} | {outcome['error']:+.2%}{where}"
        lines.append(
            f"{start} {cells} | 2^{rate['low90']:.2f} to 2^{rate['high90']:.2f} | 2^{rate['came']:.2f} |"
        )
    lines += ["", "Without a law, and so without a forecast:", ""]
    lacking: dict[str, list[str]] = {}
    for row in content["hindsight"]:
        if "none" in row:
            lacking.setdefault(row["none"].removeprefix("no law: "), []).append(
                f"{row['study']} under `{row['preset']}`"
            )
    lines += [f"- {', '.join(studies)}: {reason}." for reason, studies in lacking.items()]
    return "\n".join(lines)


def _misses(forecasts: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the forecasts whose 90 % interval did not hold the outcome."""
    lines = [
        "",
        "The outcomes outside of their 90 % interval; `docs/evidence/forecasts.json` has every forecast.",
        "",
        "| forecast of | run | parameters | tokens | loss | 90 % | came | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in forecasts:
        outcome = entry["outcome"]
        if not outcome or outcome["inside90"]:
            continue
        loss = entry["prediction"]["loss"]
        diverged = outcome["loss"] is None
        cells = [
            entry["from"],
            entry["what"].partition(", at")[0],
            f"{entry['scale']['parameters']:,}",
            f"{entry['scale']['tokens']:,}",
            f"{loss['value']:.4f}",
            f"{loss['low90']:.4f} to {loss['high90']:.4f}",
            "diverged" if diverged else f"{outcome['loss']:.4f}",
            "" if diverged else f"{outcome['error']:+.2%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(text: str, content: dict[str, Any]) -> str:
    """The text of docs/evidence/forecasts.md with the board in its place.

    Args:
        text: of the page.
        content: of docs/evidence/forecasts.json.
    """
    return replaced(text, "board", f"\n{document(content)}\n")


@dataclass(frozen=True)
class Options:
    """Flags of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Score every forecast that has come and write both files; returns the exit code 0."""
    harness.parse(Options, argv)
    board = collected(DOCS / "forecasts")
    folders = dict.fromkeys(entry["from"] for entry in board)
    summaries = {
        name: summary([entry for entry in board if entry["from"] == name]) for name in folders
    }
    content = {"summary": summaries, "forecasts": board, "hindsight": hindsight(DOCS / "transfer")}
    disk.write_whole(DOCS / "forecasts.json", json.dumps(content, indent=1) + "\n")
    disk.write_whole(DOCS / "forecasts.md", page((DOCS / "forecasts.md").read_text(), content))
    for name, of_folder in summaries.items():
        print(f"{name}: {of_folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
