"""docs/reproduction.md, made from the records of the figures, and the list of figures there are."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.figures.result import Figure

HEAD = """# The papers' figures, measured again

Made by `python -m scripts.figures --render` from the records in `docs/figures/`; `make figures` measures them all on a CPU,
in {minutes} minutes of CPU time. Figures of whole runs share those they have in common: their CPU time stands with the first.
Each row holds a number against what its source predicts: it reproduces where the estimate lies within the band (±) around
the prediction and its 95 % interval over seeds is not twice as wide as the band; it does not where the whole interval lies
outside; else it is undecided. Where the source says only that a number is above a bound, the whole interval must be. A control must
fail.
"""


def names() -> list[str]:
    """The figures there are: a file `fig*.py` each, in some room."""
    return sorted(_rooms())


def load(name: str) -> Figure:
    """The figure in the file of this name."""
    return importlib.import_module(f"scripts.figures.{_rooms()[name]}.{name}").FIGURE


def _rooms() -> dict[str, str]:
    return {path.stem: path.parent.name for path in Path(__file__).parent.glob("*/fig*.py")}


def text(folder: Path) -> str:
    """The page, from the records in `folder`."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("fig*.json"))}
    minutes = round(sum(record["seconds"] for record in records.values()) / 60)
    parts = [HEAD.format(minutes=minutes), _summary(records)]
    parts += [_section(folder.name, name, record) for name, record in records.items()]
    return "\n".join(parts)


def sentence(row: Mapping[str, Any]) -> str:
    """A row in one line of text."""
    predicted = "" if row["predicted"] is None else f", predicted {_predicted(row)}"
    return f"{row['what']}: {_measured(row)}{predicted}: {row['verdict']}"


def _summary(records: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        row for record in records.values() for row in record["rows"] if row["predicted"] is not None
    ]
    claims = [row for row in rows if not row["control"]]
    against = [row for row in claims if not row["verdict"].startswith("reproduces")]
    good = len(claims) - len(against)
    lines = [
        f"Of {len(claims)} predictions {good} reproduce; {len(rows) - len(claims)} controls stand beside them."
    ]
    if against:
        lines += ["", "What does not, or not surely:", ""]
        lines += [f"- {sentence(row)}" for row in against]
    return "\n".join([*lines, ""])


def _section(folder: str, name: str, record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    lines = [f"## {record['title']}", "", f"{record['about']} Source: {record['source']}.", ""]
    lines += [f"`{record['command']}` ({record['seconds']} s of CPU time; {versions})", ""]
    lines += [f"![{record['title']}]({folder}/{name}.png)", ""]
    lines += ["| what | predicted | measured [95 %] | verdict |", "|---|---|---|---|"]
    for row in record["rows"]:
        predicted = "" if row["predicted"] is None else _predicted(row)
        source = f" ({row['source']})" if row["source"] else ""
        note = f" {row['note']}" if row["note"] else ""
        lines.append(
            f"| {row['what']} | {predicted}{source} | {_measured(row)} | {row['verdict']}.{note} |"
        )
    return "\n".join([*lines, ""])


def _measured(row: Mapping[str, Any]) -> str:
    low, high = (_number(row, row[end]) for end in ("low", "high"))
    return f"{_number(row, row['measured'])} [{low}, {high}]"


def _number(row: Mapping[str, Any], value: float) -> str:
    return f"{value:+.2f}" if row["kind"] == "exponent" else f"{value:.4g}"


def _predicted(row: Mapping[str, Any]) -> str:
    number = _number(row, row["predicted"])
    return f"above {number}" if row.get("above") else f"{number} ± {row['tolerance']:.2g}"
