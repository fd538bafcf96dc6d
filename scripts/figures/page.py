"""Text of docs/evidence/reproduction.md, made from the figures' records, and the list of figures.

`python -m scripts.figures` writes the page and loads the figures by their names.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.figures.result import Figure

Row = Mapping[str, Any]
"""Row of a record, as JSON has it."""
Record = Mapping[str, Any]
"""Record of a figure, as JSON has it."""

SHORT_SOURCES = {
    "Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)": "Bordelon et al. 2024",
    "Dinan, Yaida and Zhang 2023 (arXiv 2304.02034)": "Dinan et al. 2023",
}
"""Full citation in a record to its short form on the page, whose head has the arXiv numbers."""

HEAD = """# The papers' figures, measured again

This page repeats figures of Bordelon et al. 2024 (arXiv 2405.15712) and Dinan et al. 2023 (arXiv 2304.02034) on smaller models,
and adds predictions of this project.
`make figures ARGS=--again` measures all, `python -m scripts.figures NAME --again` one. Both skip training runs finished in
`runs/figures`. Without such runs, all figures take {minutes} minutes of CPU time.

A predicted value **reproduces** if the estimate lies in the band (±) around it and the 95 % interval over seeds is at most twice as wide.
A predicted lower bound reproduces if the whole interval lies above it. A prediction **does not reproduce** if the whole interval lies
outside the band. Otherwise it is undecided. A control is a wrong prediction: it must fail, that is, not reproduce.
"""


def names() -> list[str]:
    """Return the names of all figures: the files `fig*.py` in the folders of `scripts/figures`."""
    return sorted(_folders())


def load(name: str) -> Figure:
    """Import the file of a figure and return its `FIGURE`."""
    return importlib.import_module(f"scripts.figures.{_folders()[name]}.{name}").FIGURE


def _folders() -> dict[str, str]:
    """Return the name of every figure to the name of its folder in `scripts/figures`."""
    files = Path(__file__).parent.glob("*/fig*.py")
    return {file.stem: file.parent.name for file in files}


def text(folder: Path) -> str:
    """Return the page's Markdown, made from all records in `folder`."""
    records = {}
    for path in sorted(folder.glob("fig*.json")):
        records[path.stem] = json.loads(path.read_text())
    seconds = sum(record["seconds"] for record in records.values())
    head = HEAD.format(minutes=round(seconds / 60))
    sections = [_section(folder.name, name, record) for name, record in records.items()]
    return "\n".join([head, _summary(records), *sections])


def sentence(row: Row) -> str:
    """Return a row as a line of text for the command: measured, predicted and the verdict."""
    predicted = ""
    if row["predicted"] is not None:
        predicted = f", predicted {_predicted(row)}"
    return f"{row['what']}: {_measured(row)}{predicted}: {row['verdict']}"


def _summary(records: Mapping[str, Record]) -> str:
    """Return the paragraph that counts the predictions and controls of all records."""
    predicted: list[Row] = []
    for record in records.values():
        for row in record["rows"]:
            if row["predicted"] is not None:
                predicted.append(row)
    claims = [row for row in predicted if not row["control"]]
    num_controls = len(predicted) - len(claims)
    num_reproduced = sum(map(_reproduces, claims))
    num_undecided = sum(map(_is_undecided, claims))
    num_refuted = len(claims) - num_reproduced - num_undecided
    num_failed = sum(map(_fails_as_control, predicted))
    return (
        f"**{num_reproduced} of {len(claims)} predictions reproduce**, {num_refuted} do not, and "
        f"{num_undecided} are undecided. {num_failed} of {num_controls} controls fail, as all should. The tables "
        "show what does not reproduce, and controls that do not fail. Records have all rows and the method.\n"
    )


def _section(folder: str, name: str, record: Record) -> str:
    """Return the section of one figure.

    Args:
        folder: Name of the folder with records and pictures, next to the page.
        name: Name of the record's file, without its suffix.
    """
    about = record["about"].partition("\n\n")[0]
    source = record["source"]
    for citation, short in SHORT_SOURCES.items():
        source = source.replace(citation, short)
    # The title and the text name figures of Bordelon et al.
    origin = "" if record["title"].startswith("Figure") else f"Source: {source}. "
    counts = _counts(record["rows"])
    link = f"[`{name}`]({folder}/{name}.json)"
    lines = [
        f"## {record['title']}",
        "",
        f"{origin}{about}",
        "",
        f"{link}: {counts}." if counts else link,
        "",
        f"![{name}]({folder}/{name}.png)",
        "",
    ]
    failures = _failures(record["rows"])
    if failures:
        lines += ["| what | predicted | measured [95 %] | verdict |", "|---|---|---|---|"]
        lines += [_table_row(row) for row in failures]
        lines.append("")
        # A note that all rows share explains the table; the record has the other notes.
        notes = {row["note"] for row in failures}
        if len(notes) == 1 and notes != {""} and len(failures) > 1:
            lines += [*notes, ""]
    return "\n".join(lines)


def _counts(rows: Sequence[Row]) -> str:
    """Return how many predictions of a figure reproduce and how many of its controls fail.

    The text is empty for a figure that has neither.
    """
    claims = []
    controls = []
    for row in rows:
        if row["control"]:
            controls.append(row)
        elif row["predicted"] is not None:
            claims.append(row)
    counts = []
    if claims:
        num_reproduced = sum(map(_reproduces, claims))
        counts.append(f"{num_reproduced} of {len(claims)} predictions reproduce")
        if num_undecided := sum(map(_is_undecided, claims)):
            counts.append(f"{num_undecided} undecided")
    if controls:
        num_failed = sum(map(_fails_as_control, controls))
        fraction = f"{num_failed} of {len(controls)} controls"
        if num_failed == len(controls):
            counts.append(f"{fraction} rightly fail")
        else:
            counts.append(f"only {fraction} fail")
    return "; ".join(counts)


def _reproduces(row: Row) -> bool:
    return row["verdict"].startswith("reproduces")


def _is_undecided(row: Row) -> bool:
    return row["verdict"].startswith("undecided")


def _fails_as_control(row: Row) -> bool:
    return row["verdict"].startswith("control: fails")


def _failures(rows: Sequence[Row]) -> list[Row]:
    """Return the rows for the page's table: refuted predictions, and controls that do not fail."""
    failures = []
    for row in rows:
        if row["predicted"] is None or _reproduces(row) or _is_undecided(row):
            continue
        if not _fails_as_control(row):
            failures.append(row)
    return failures


def _table_row(row: Row) -> str:
    """Return a row as a line of a Markdown table, without the reason of its verdict."""
    source = f" ({row['source']})" if row["source"] else ""
    verdict = row["verdict"]
    if row["control"]:
        verdict = verdict.partition(",")[0]
    else:
        verdict = verdict.partition(":")[0]
    return f"| {row['what']} | {_predicted(row)}{source} | {_measured(row)} | {verdict} |"


def _measured(row: Row) -> str:
    low = _number(row, row["low"])
    high = _number(row, row["high"])
    return f"{_number(row, row['measured'])} [{low}, {high}]"


def _number(row: Row, value: float) -> str:
    return f"{value:+.2f}" if row["kind"] == "exponent" else f"{value:.4g}"


def _predicted(row: Row) -> str:
    number = _number(row, row["predicted"])
    return f"above {number}" if row.get("above") else f"{number} ± {row['tolerance']:.2g}"
