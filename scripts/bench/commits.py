"""The commit of the program that a compiled figure is of: what stands in the checkout, or where a committed report first stood."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS = ("docs/evidence/pods.json", "docs/pods.json")
"""Where the reports of pods are, and where they were before."""


def head(root: Path) -> dict[str, str]:
    """The commit that stands in a checkout, and its day.

    Args:
        root: of the checkout.

    Raises:
        SystemExit: what is compiled there is not what was committed: its figures would be of no commit.
    """
    if changed := _git(root, "status", "--porcelain", "--", "*.py", ":!scripts", ":!tests"):
        raise SystemExit(
            f"commit first what a step is made of, so that its figures have a commit:\n{changed}"
        )
    return dict(
        zip(("commit", "date"), _git(root, "log", "-1", "--format=%h %cs").split(), strict=True)
    )


def first_committed(report: dict[str, Any], root: Path) -> dict[str, str] | None:
    """The first commit that has a report in `docs/evidence/pods.json`; None where none has, or the folder is no checkout.

    Args:
        report: told from others of its pod by its cycles and the time that the compiler took.
        root: of the checkout.
    """

    def key(one: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(
            one.get(name) for name in ("recipe", "topology", "estimated_cycles", "compile_seconds")
        )

    first = None
    for commit, date, reports in _history(root):
        if key(report) not in map(key, reports):
            break
        first = {"commit": commit, "date": date}
    return first


def _history(root: Path) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Commit, its day and the reports in it, the last commit first."""
    for line in _git(root, "log", "--format=%h %cs", "--", *RECORDS).splitlines():
        commit, date = line.split()
        contents = [_git(root, "show", f"{commit}:{path}") for path in RECORDS]
        content = next(text for text in contents if text)
        yield commit, date, json.loads(content)["pods"]


def _git(root: Path, *words: str) -> str:
    """What git says of a checkout; nothing where it says nothing or there is none."""
    return subprocess.run(
        ["git", "-C", root, *words], capture_output=True, text=True, check=False
    ).stdout.rstrip()
