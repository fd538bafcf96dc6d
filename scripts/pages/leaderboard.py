"""Drift and price of more presets than the project's own transfer studies have: a section of docs/evidence/transfer.md.

    python -m scripts.pages.leaderboard [--render]
    python -m scripts.pages.leaderboard NAME RECIPE --preset PRESET --grow AXIS=SIZES ...

`--render` first judges the rows of docs/evidence/leaderboard again. The second makes the study
that follows NAME, as `mupax transfer` does, in docs/evidence/leaderboard/NAME, and adds its rows.
A study that was stopped goes on when the command is typed again.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mupax import presets
from mupax.errors import MupaxError
from scripts import ROOT
from scripts.pages import markdown
from scripts.studies.transfer import judge_again

FOLDERS = (ROOT / "docs" / "evidence" / "transfer", ROOT / "docs" / "evidence" / "leaderboard")
PAGE = ROOT / "docs" / "evidence" / "transfer.md"
PART = "leaderboard"
"""Name of the page's section, and of the folder of its studies."""
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
HEADING = """## More presets

Each table is one model under one optimizer, ordered by price. Presets that give the same numbers
share a row. To add a study, give its name and the words that follow `mupax transfer`:

```text
python -m scripts.pages.leaderboard completep-depth lm-tiny --model lm-proxy --preset completep --control sp --grow depth=2,4,8,16 --steps 100
```
"""


class Row(NamedTuple):
    """One preset in one study."""

    task: str
    """Model, optimizer, steps and what grows."""
    preset: str
    drift: Mapping[str, float | None]
    verdict: str
    price: Mapping[str, float | None]
    loss: float | None
    seeds: int
    study: str
    """Its folder, relative to docs/."""


def rows(folders: Sequence[Path] = FOLDERS) -> list[Row]:
    """Those of all studies that are there, each task's by price; a preset that two studies of one task have, from the one with more seeds.

    Args:
        folders: of studies, each in a folder of its own.
    """
    best: dict[tuple[str, str], Row] = {}
    for path in sorted(path for folder in folders for path in folder.glob("*/transfer.json")):
        record = json.loads(path.read_text())
        for study in record["studies"]:
            row = _row(record, study, path.parent)
            other = best.get((row.task, row.preset))
            if other is None or other.seeds < row.seeds:
                best[row.task, row.preset] = row
    return sorted(
        best.values(), key=lambda row: (row.task, _number(row.price["value"]), row.preset)
    )


def _row(record: Mapping[str, Any], study: Mapping[str, Any], folder: Path) -> Row:
    sizes, model = study["sizes"], record["config"]["model"]
    experts = (
        f" of {model['experts']} experts"
        if model.get("experts") and study["axis"] != "experts"
        else ""
    )
    grown = f"{study['axis']} from {sizes[0]['size']:,} to {sizes[-1]['size']:,}"
    task = f"{model['family']} of width {model['width']}{experts}, {record['optimizer']}, {record['steps']:,} steps: {grown}"
    last = sizes[-1]
    return Row(
        task, study["preset"], study["drift_octaves_per_doubling"], study["verdict"], last["price_of_not_tuning"],
        last["loss"], study["seeds"], f"{folder.parent.name}/{folder.name}",
    )  # fmt: skip


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


def section(entries: Sequence[Row]) -> str:
    """Return the section of the page: one table for every task of the studies in docs/evidence/leaderboard."""
    lines = [HEADING]
    selected = [row for row in entries if row.study.startswith(f"{PART}/")]
    for task in dict.fromkeys(row.task for row in selected):
        lines += [f"### {task[0].upper()}{task[1:]}", ""]
        lines += [
            "| preset | verdict | price | drift | loss | seeds |",
            "|---|---|---|---|---|---|",
        ]

        # Presets that are one rule on this axis have the same numbers: they share a line.
        names: dict[tuple[str, ...], list[str]] = {}
        for row in selected:
            if row.task == task:
                names.setdefault(tuple(_cells(row)), []).append(f"`{row.preset}`")
        for cells, presets_of_line in names.items():
            lines.append(f"| {' | '.join([', '.join(presets_of_line), *cells])} |")
        lines.append("")
    ranked = {row.preset.split()[0] for row in entries}
    missing = ", ".join(f"`{name}`" for name in presets.PRESETS if name not in ranked)
    if missing:
        lines += [f"Presets without a study: {missing}.", ""]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    loss = "unknown" if row.loss is None else f"{row.loss:.3f}"
    price = _interval(row.price, ".3f")
    drift = _interval(row.drift, "+.2f")
    return [row.verdict, price, drift, loss, str(row.seeds)]


def _interval(of: Mapping[str, float | None], form: str) -> str:
    value, low, high = (of[name] for name in ("value", "low", "high"))
    if value is None:
        return "unknown"
    return (
        f"{value:{form}}"
        if low is None or high is None
        else f"{value:{form}} [{low:{form}}, {high:{form}}]"
    )


def add(name: str, words: Sequence[str]) -> int:
    """Make a study and return its exit code.

    Args:
        name: Name of the study's folder.
        words: Words that follow `mupax transfer`.

    Raises:
        MupaxError: a name that is no folder's, or is one of the project's own studies.
    """
    from mupax.train.studies.transfer import command

    if not NAME.fullmatch(name):
        raise MupaxError(
            f"{name!r} is no study's name: write small letters, digits and single hyphens"
        )
    if (FOLDERS[0] / name).exists():
        raise MupaxError(
            f"docs/evidence/transfer/{name} is one of the project's own studies; choose another name"
        )
    with contextlib.chdir(ROOT):
        return command.main([*words, "--out", f"docs/evidence/leaderboard/{name}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Make the study that is named, if any, and write the section; return the study's exit code, 2 for a wrong name."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if words == ["--render"]:
        for path in sorted(FOLDERS[1].glob("*/transfer.json")):
            judge_again(path.parent)
        words = []
    try:
        code = add(words[0], words[1:]) if words else 0
    except MupaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if code:
        return code
    PAGE.write_text(markdown.replaced(PAGE.read_text(), PART, section(rows())))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
