"""docs/evidence/reproduction.md, made from the records of the figures, and the list of figures there are."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.figures.result import Figure

HEAD = """# The papers' figures, measured again

`make figures` measures every figure on a CPU in {minutes} minutes of CPU time, and `python -m scripts.figures --render` writes this page
from the records. Each row compares a number with the prediction of its source:

| verdict | means |
|---|---|
| reproduces | the estimate lies in the band (±) around the prediction, and its 95 % interval over seeds is at most twice as wide as the band |
| does not reproduce | the whole interval lies outside of the band |
| undecided | neither |

Where a source only says that a number is above a bound, the whole interval must be above it. A control must fail.
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
    predicted: list[Mapping[str, Any]] = []
    for record in records.values():
        predicted += [row for row in record["rows"] if row["predicted"] is not None]
    claims = [row for row in predicted if not row["control"]]
    controls = len(predicted) - len(claims)
    good = sum(map(_reproduces, claims))
    return (
        f"Of {len(claims)} predictions {good} reproduce; {controls} controls stand beside them. "
        "The tables show every row that does not reproduce, and the first one of each figure that "
        "does.\n"
    )


def _section(folder: str, name: str, record: Mapping[str, Any]) -> str:
    claims = [row for row in record["rows"] if row["predicted"] is not None and not row["control"]]
    controls = [row for row in record["rows"] if row["control"]]
    good = sum(map(_reproduces, claims))
    failed = sum(row["verdict"].startswith("control: fails") for row in controls)

    counts = [f"{good} of {len(claims)} predictions reproduce"] if claims else []
    counts += [f"{failed} of {len(controls)} controls fail as they must"] if controls else []
    counts.append(f"all rows are in [{name}.json]({folder}/{name}.json)")
    return "\n".join(
        [
            f"## {record['title']}",
            "",
            f"{record['about']} Source: {record['source']}.",
            "",
            f"`{record['command']}` ({record['seconds']} s of CPU time): {'; '.join(counts)}.",
            "",
            f"![{record['title']}]({folder}/{name}.png)",
            "",
            "| what | predicted | measured [95 %] | verdict |",
            "|---|---|---|---|",
            *(_line(row) for row in _shown(record["rows"])),
            "",
        ]
    )


def _reproduces(row: Mapping[str, Any]) -> bool:
    return row["verdict"].startswith("reproduces")


def _shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first row, and all others that go against a prediction."""
    shown = [rows[0]]
    for row in rows[1:]:
        failed_control = row["verdict"].startswith("control: fails")
        if row["predicted"] is not None and not _reproduces(row) and not failed_control:
            shown.append(row)
    return shown


def _line(row: Mapping[str, Any]) -> str:
    predicted = "" if row["predicted"] is None else _predicted(row)
    source = f" ({row['source']})" if row["source"] else ""
    note = f" {row['note']}" if row["note"] else ""
    return f"| {row['what']} | {predicted}{source} | {_measured(row)} | {row['verdict']}.{note} |"


def _measured(row: Mapping[str, Any]) -> str:
    low, high = (_number(row, row[end]) for end in ("low", "high"))
    return f"{_number(row, row['measured'])} [{low}, {high}]"


def _number(row: Mapping[str, Any], value: float) -> str:
    return f"{value:+.2f}" if row["kind"] == "exponent" else f"{value:.4g}"


def _predicted(row: Mapping[str, Any]) -> str:
    number = _number(row, row["predicted"])
    return f"above {number}" if row.get("above") else f"{number} ± {row['tolerance']:.2g}"
