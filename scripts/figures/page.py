"""docs/evidence/reproduction.md, made from the records of the figures, and the list of figures there are."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.figures.result import Figure

_FIRST_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")

HEAD = """# The papers' figures, measured again

`make figures` measures every figure on a CPU in {minutes} minutes of CPU time, `python -m scripts.figures NAME` one of them, and
`python -m scripts.figures --render` writes this page from the records. Each row compares a measured value with the prediction of its source:

| verdict | means |
|---|---|
| reproduces | the estimate lies in the band (±) around the prediction, and its 95 % interval over seeds is at most twice as wide as the band |
| does not reproduce | the whole interval lies outside of the band |
| undecided | neither |

Where a source only gives a lower bound, the whole interval must be above it. A control must fail.
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
        f"**{good} of {len(claims)} predictions reproduce**; {controls} controls stand beside them. "
        "The tables on this page show every prediction that does not reproduce or is undecided. "
        "A figure's record has all rows, and says in full how it was measured.\n"
    )


def _section(folder: str, name: str, record: Mapping[str, Any]) -> str:
    claims = [row for row in record["rows"] if row["predicted"] is not None and not row["control"]]
    controls = [row for row in record["rows"] if row["control"]]
    good = sum(map(_reproduces, claims))
    failed = sum(row["verdict"].startswith("control: fails") for row in controls)

    counts = [f"{good} of {len(claims)} predictions reproduce"] if claims else []
    counts += [f"{failed} of {len(controls)} controls fail as they must"] if controls else []
    counts.append(f"[rows and method]({folder}/{name}.json)")
    lines = [
        f"## {record['title']}",
        "",
        f"{_FIRST_SENTENCE.split(record['about'])[0]} Source: {record['source']}.",
        "",
        f"`{name}` ({record['seconds']} s): {'; '.join(counts)}.",
        "",
        f"![{record['title']}]({folder}/{name}.png)",
        "",
    ]
    if against := _against(record["rows"]):
        lines += ["| what | predicted | measured [95 %] | verdict |", "|---|---|---|---|"]
        lines += [_line(row) for row in against]
        lines.append("")
    return "\n".join(lines)


def _reproduces(row: Mapping[str, Any]) -> bool:
    return row["verdict"].startswith("reproduces")


def _against(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that go against a prediction."""
    against: list[Mapping[str, Any]] = []
    for row in rows:
        failed_control = row["verdict"].startswith("control: fails")
        if row["predicted"] is not None and not _reproduces(row) and not failed_control:
            against.append(row)
    return against


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
