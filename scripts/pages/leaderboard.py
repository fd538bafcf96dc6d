"""Section of docs/evidence/transfer.md about more presets, from docs/evidence/leaderboard.

    python -m scripts.pages.leaderboard [--render]
    python -m scripts.pages.leaderboard NAME RECIPE --preset PRESET --grow AXIS=SIZES ...

The first line writes the section; `--render` judges the recorded rows again before. The second line
runs the study as `mupax transfer` does, in docs/evidence/leaderboard/NAME, and adds its rows. An
interrupted study resumes when the line is typed again.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mupax import MupaxError, presets
from scripts import ROOT
from scripts.pages import markdown
from scripts.studies.transfer import compact, interval_text, judge_again, loss_text

FOLDERS = (ROOT / "docs" / "evidence" / "transfer", ROOT / "docs" / "evidence" / "leaderboard")
"""Folders of the project's own studies, and of those that this command adds."""
PAGE = ROOT / "docs" / "evidence" / "transfer.md"
PART = "leaderboard"
"""Name of the section's markers, and of the folder of its studies."""
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""Form of a study's name, which becomes a folder."""
HEADING = """## More presets

`python -m scripts.pages.leaderboard NAME WORDS` runs `mupax transfer WORDS` and adds the study.
"""


class Row(NamedTuple):
    """Result of one preset in one study."""

    task: str
    """Model, optimizer, steps, batch and what grows, in words; without steps if tokens grow."""
    preset: str
    """Name and constants, and the rate of Muon's Adam part if it has its own."""
    drift: Mapping[str, float | None]
    """Octaves of the best learning rate per doubling of the size: `value`, `low` and `high`."""
    verdict: str
    price: Mapping[str, float | None]
    """Nats that the largest size loses at the smallest size's best rate, with the same keys."""
    loss: float | None
    """Training loss of the largest size at its own best rate, in nats."""
    seeds: int
    study: str
    """Folder of the study, relative to docs/evidence/."""


def rows(folders: Sequence[Path] = FOLDERS) -> list[Row]:
    """Return one row for each task and preset, ordered by task and then by price.

    If two studies of one task have the same preset, the row is that of the study with more seeds.

    Args:
        folders: Folders with a subfolder for each study, which holds its transfer.json.
    """
    best: dict[tuple[str, str], Row] = {}
    paths: list[Path] = []
    for folder in folders:
        paths += folder.glob("*/transfer.json")
    for path in sorted(paths):
        record = json.loads(path.read_text())
        for study in record["studies"]:
            row = _row(record, study, path.parent)
            present = best.get((row.task, row.preset))
            if present is None or present.seeds < row.seeds:
                best[row.task, row.preset] = row
    return sorted(
        best.values(), key=lambda row: (row.task, _number(row.price["value"]), row.preset)
    )


def _row(record: Mapping[str, Any], study: Mapping[str, Any], folder: Path) -> Row:
    """Return the row of one preset of a study's record."""
    sizes = study["sizes"]
    model = record["config"]["model"]
    experts = ""
    if model.get("experts") and study["axis"] != "experts":
        experts = f" of {model['experts']} experts"
    grown = f"{study['axis']} {sizes[0]['size']:,} to {sizes[-1]['size']:,}"
    length = f"{record['steps']:,} steps of {record['batch']:,}"
    if study["axis"] == "tokens":
        length = f"batches of {record['batch']:,}"
    task = (
        f"{model['family']}, width {model['width']}{experts}, {record['optimizer']}, {length}: "
        f"{grown}"
    )
    preset = study["preset"]
    # Studies from before this flag do not have the field.
    adam_lr = record["config"]["optimizer"].get("adam_lr")
    if adam_lr is not None:
        preset = f"{preset} adam_lr={adam_lr:g}"
    return Row(
        task=task,
        preset=preset,
        drift=study["drift_octaves_per_doubling"],
        verdict=study["verdict"],
        price=sizes[-1]["price_of_not_tuning"],
        loss=sizes[-1]["loss"],
        seeds=study["seeds"],
        study=f"{folder.parent.name}/{folder.name}",
    )


def _number(value: float | None) -> float:
    """Return a value as a sort key: infinity for `None`, so that unknown values come last."""
    return float("inf") if value is None else value


def section(entries: Sequence[Row]) -> str:
    """Return the section of the page: one table for each task of docs/evidence/leaderboard."""
    lines = [HEADING]
    selected = [row for row in entries if row.study.startswith(f"{PART}/")]
    for task in dict.fromkeys(row.task for row in selected):
        lines += [f"### {task[0].upper()}{task[1:]}", ""]
        # Presets that are one rule on this axis have the same numbers: they share a line.
        names: dict[tuple[str, ...], list[str]] = {}
        for row in selected:
            if row.task == task:
                names.setdefault(tuple(_cells(row)), []).append(f"`{row.preset}`")
        rows = [["preset", "verdict", "price", "drift", "loss"]]
        for cells, presets_of_line in names.items():
            rows.append([", ".join(presets_of_line), *cells])
        lines += [markdown.table(rows), ""]
    ranked = {row.preset.split()[0] for row in entries}
    missing = ", ".join(f"`{name}`" for name in presets.PRESETS if name not in ranked)
    if missing:
        lines += [f"Presets without a study: {missing}.", ""]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    """Return the cells of a table row after the preset."""
    price = interval_text(row.price, ".3f")
    drift = interval_text(row.drift, "+.2f")
    return [row.verdict, price, drift, loss_text(row.loss)]


def add(name: str, words: Sequence[str]) -> int:
    """Run a study in docs/evidence/leaderboard and return the exit code of `mupax transfer`.

    Args:
        name: Name of the study's folder: small letters, digits and single hyphens.
        words: Words that follow `mupax transfer`.

    Raises:
        MupaxError: The name has another form, or one of the project's own studies has it.
    """
    from mupax.train.studies.transfer import command

    if not NAME.fullmatch(name):
        raise MupaxError(
            f"{name!r} is no study's name: write small letters, digits and single hyphens"
        )
    if (FOLDERS[0] / name).exists():
        raise MupaxError(
            f"docs/evidence/transfer/{name} is one of the project's own studies; "
            "choose another name"
        )
    # The words of a study have paths from the checkout's root.
    with contextlib.chdir(ROOT):
        return command.main([*words, "--out", f"docs/evidence/leaderboard/{name}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named study, if any, and write the section.

    Returns:
        0, 2 for a wrong name, or the exit code of a study that failed.
    """
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
    compact(FOLDERS[1])
    PAGE.write_text(markdown.replaced(PAGE.read_text(), PART, section(rows())))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
