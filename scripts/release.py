"""Whether the version and its day are said alike everywhere, before a release is built.

    python -m scripts.release

`make release` begins with it. A version that is being prepared has entries under `Unreleased` and no day; both get it in the commit that
is released (CONTRIBUTING.md, Versions).
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

from scripts import ROOT

DISTRIBUTIONS = ("pyproject.toml", "packaging/presets/pyproject.toml")
"""Each takes its version from a file that it names."""
HEADING = re.compile(r"^## +(?P<title>.*?) *$(?P<entries>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
RELEASED = re.compile(r"(?P<version>\d+\.\d+\.\d+) - (?P<day>\d{4}-\d\d-\d\d)")


def version(root: Path = ROOT, pyproject: str = "pyproject.toml") -> str:
    """The version of a distribution, from the file that its pyproject.toml names.

    Raises:
        ValueError: that file assigns no `__version__`.
    """
    path = (root / pyproject).parent / tomllib.loads((root / pyproject).read_text())["tool"][
        "hatch"
    ]["version"]["path"]
    assigned = re.search(r'^__version__ = "(.*)"$', path.read_text(), re.MULTILINE)
    if assigned is None:
        raise ValueError(f'{path} assigns no version; write `__version__ = "X.Y.Z"`')
    return assigned[1]


def sections(root: Path = ROOT) -> dict[str, str]:
    """Title to entries of CHANGELOG.md's sections, in their order."""
    return {
        match["title"]: match["entries"].strip()
        for match in HEADING.finditer((root / "CHANGELOG.md").read_text())
    }


def released(root: Path = ROOT) -> dict[str, str]:
    """Version to day of CHANGELOG.md's sections that have both, in their order: the newest first."""
    return {
        match["version"]: match["day"]
        for title in sections(root)
        if (match := RELEASED.fullmatch(title))
    }


def citation(root: Path = ROOT) -> dict[str, Any]:
    """Fields of CITATION.cff; a day as YYYY-MM-DD."""
    fields = yaml.safe_load((root / "CITATION.cff").read_text())
    return {
        name: str(value) if isinstance(value, datetime.date) else value
        for name, value in fields.items()
    }


def _of_changelog(name: str, root: Path, today: datetime.date) -> Iterator[str]:
    """What is wrong with the section of version `name`."""
    days, write = released(root), f"## {name} - {today}"
    if name not in days:
        near = next((title for title in sections(root) if title.startswith(name)), "Unreleased")
        yield f"CHANGELOG.md has no section of {name} with its day; in place of `## {near}` write `{write}`"
        return
    if sections(root).get("Unreleased"):
        yield f"CHANGELOG.md has entries under `## Unreleased`, which {name} would hold and not name; put them under `{write}`"
    if next(iter(days)) != name:
        newest = next(iter(days))
        yield f'CHANGELOG.md begins with {newest} and mupax is {name}; write `__version__ = "{newest}"`, or a section of {name} above it'
    try:
        day = datetime.date.fromisoformat(days[name])
    except ValueError:
        yield f"CHANGELOG.md: {days[name]} is no day; write `{write}`"
    else:
        if day > today:
            yield f"CHANGELOG.md: {name} is of {day}, and today is {today}; write `{write}`"


def problems(root: Path = ROOT, today: datetime.date | None = None) -> list[str]:
    """What must be written before the version can be released; each names a file and the line to write.

    Args:
        root: the checkout.
        today: in UTC, by default that of the clock; no release is of a later day.
    """
    today = today or datetime.datetime.now(datetime.UTC).date()
    name, fields, wrong = version(root), citation(root), []
    if not re.fullmatch(r"\d+\.\d+\.\d+", name):
        wrong.append(
            f"version {name} is not of the form X.Y.Z; write it so where `__version__` is assigned"
        )
    for pyproject in DISTRIBUTIONS[1:]:
        if (other := version(root, pyproject)) != name:
            wrong.append(
                f"{pyproject} is of version {other} and mupax of {name}; let both name one file"
            )
    wrong += _of_changelog(name, root, today)
    if str(fields.get("version")) != name:
        wrong.append(f"CITATION.cff has version {fields.get('version')}; write `version: {name}`")
    day = released(root).get(name, str(today))
    if fields.get("date-released") != day:
        stands = (
            f"has date-released {fields['date-released']}"
            if "date-released" in fields
            else "has no date-released"
        )
        wrong.append(f"CITATION.cff {stands}; write `date-released: {day}`")
    return wrong


def main() -> int:
    """Prints what must be written first, one line each; 1 where there is any."""
    wrong = problems()
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print(f"version {version()} of {released()[version()]} everywhere")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
