"""Check that the version and its day are the same everywhere, before a release is built.

    python -m scripts.release

`make release` begins with it. While a version is prepared, CHANGELOG.md has its entries under
`Unreleased`, without a day. The commit that is released names version and day (CONTRIBUTING.md,
Versions).
"""

from __future__ import annotations

import datetime
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from scripts import ROOT, harness

DISTRIBUTIONS = ("pyproject.toml", "packaging/presets/pyproject.toml")
"""Project files, of which each names a file with its version."""
HEADING = re.compile(r"^## +(?P<title>.*?) *$(?P<entries>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
"""Section of CHANGELOG.md: its title, and the entries up to the next section."""
RELEASED = re.compile(r"(?P<version>\d+\.\d+\.\d+) - (?P<day>\d{4}-\d\d-\d\d)")
"""Title of a released version's section."""


def version(root: Path = ROOT, pyproject: str = "pyproject.toml") -> str:
    """Return the version of a distribution, from the file that its pyproject.toml names.

    Raises:
        ValueError: The file assigns no `__version__`.
    """
    project = tomllib.loads((root / pyproject).read_text())
    path = (root / pyproject).parent / project["tool"]["hatch"]["version"]["path"]
    assigned = re.search(r'^__version__ = "(.*)"$', path.read_text(), re.MULTILINE)
    if assigned is None:
        raise ValueError(f'{path} assigns no version; write `__version__ = "X.Y.Z"`')
    return assigned[1]


def sections(root: Path = ROOT) -> dict[str, str]:
    """Return title to entries of the sections in CHANGELOG.md, in their order."""
    text = (root / "CHANGELOG.md").read_text()
    return {match["title"]: match["entries"].strip() for match in HEADING.finditer(text)}


def released(root: Path = ROOT) -> dict[str, str]:
    """Return version to day of the released versions in CHANGELOG.md, the newest first."""
    days = {}
    for title in sections(root):
        match = RELEASED.fullmatch(title)
        if match:
            days[match["version"]] = match["day"]
    return days


def citation(root: Path = ROOT) -> dict[str, Any]:
    """Return the fields of CITATION.cff, with days as text YYYY-MM-DD."""
    fields = yaml.safe_load((root / "CITATION.cff").read_text())
    for name, value in fields.items():
        if isinstance(value, datetime.date):
            fields[name] = str(value)
    return fields


def _problems_of_changelog(name: str, root: Path, today: datetime.date) -> Iterator[str]:
    """Yield the problems of CHANGELOG.md for version `name`, each with the line to write."""
    days = released(root)
    heading = f"## {name} - {today}"
    if name not in days:
        near = next((title for title in sections(root) if title.startswith(name)), "Unreleased")
        yield (
            f"CHANGELOG.md has no section of {name} with its day; in place of `## {near}` "
            f"write `{heading}`"
        )
        return
    if sections(root).get("Unreleased"):
        yield (
            f"CHANGELOG.md has entries under `## Unreleased`, which {name} would hold and not "
            f"name; put them under `{heading}`"
        )
    newest = next(iter(days))
    if newest != name:
        yield (
            f"CHANGELOG.md begins with {newest} and mupax is {name}; "
            f'write `__version__ = "{newest}"`, or a section of {name} above it'
        )
    try:
        day = datetime.date.fromisoformat(days[name])
    except ValueError:
        yield f"CHANGELOG.md: {days[name]} is no day; write `{heading}`"
        return
    if day > today:
        yield f"CHANGELOG.md: {name} is of {day}, and today is {today}; write `{heading}`"


def problems(root: Path = ROOT, today: datetime.date | None = None) -> list[str]:
    """Return one line for each file that must change before the release, with the line to write.

    Args:
        root: Checkout to release, by default this one.
        today: Day of the release in UTC, by default that of the clock.
    """
    today = today or datetime.datetime.now(datetime.UTC).date()
    name = version(root)
    wrong: list[str] = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", name):
        wrong.append(
            f"version {name} is not of the form X.Y.Z; write it so where `__version__` is assigned"
        )
    for pyproject in DISTRIBUTIONS[1:]:
        version_there = version(root, pyproject)
        if version_there != name:
            wrong.append(
                f"{pyproject} is of version {version_there} and mupax of {name}; "
                "let both name one file"
            )
    wrong += _problems_of_changelog(name, root, today)

    fields = citation(root)
    if str(fields.get("version")) != name:
        wrong.append(f"CITATION.cff has version {fields.get('version')}; write `version: {name}`")
    day = released(root).get(name, str(today))
    if fields.get("date-released") != day:
        present = "has no date-released"
        if "date-released" in fields:
            present = f"has date-released {fields['date-released']}"
        wrong.append(f"CITATION.cff {present}; write `date-released: {day}`")
    return wrong


def main() -> int:
    """Print the problems, one line each, and return 1 if there are any."""
    wrong = problems()
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print(f"version {version()} of {released()[version()]} everywhere")
    return int(bool(wrong))


if __name__ == "__main__":
    harness.refuse_words()
    raise SystemExit(main())
