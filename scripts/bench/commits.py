"""Git commits of the programs that the compiler's figures (memory, cycles) belong to.

A new figure gets the commit of the checkout. A committed report that names no commit gets the
commit that added the report. Used by `pods` and `tpu`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS = ("docs/evidence/pods.json", "docs/pods.json")
"""Paths of pods.json in the repository: the present one, then the one in older commits."""


def head(root: Path) -> dict[str, str]:
    """Return `commit` (short hash) and `date` of a checkout's last commit.

    Raises:
        SystemExit: Product files have changes that are not committed, so figures would have no
            commit.
    """
    changed = _git(root, "status", "--porcelain", "--", "*.py", ":!scripts", ":!tests")
    if changed:
        raise SystemExit(
            f"commit first what a step is made of, so that its figures have a commit:\n{changed}"
        )
    commit, date = _git(root, "log", "-1", "--format=%h %cs").split()
    return {"commit": commit, "date": date}


def first_committed(report: dict[str, Any], root: Path) -> dict[str, str] | None:
    """Return the commit that added a report to docs/evidence/pods.json.

    A report is identified by its recipe, its topology, its cycles and the time that the compiler
    took.

    Returns:
        `commit` and `date`; `None` if the newest commit does not have the report, or if the folder
        is no checkout.
    """
    oldest = None
    for commit, date, reports in _history(root):
        if _key(report) not in map(_key, reports):
            break
        oldest = {"commit": commit, "date": date}
    return oldest


def _key(report: dict[str, Any]) -> tuple[Any, ...]:
    names = ("recipe", "topology", "estimated_cycles", "compile_seconds")
    return tuple(report.get(name) for name in names)


def _history(root: Path) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield each commit that changed pods.json, its date and its reports, the newest first."""
    for line in _git(root, "log", "--format=%h %cs", "--", *RECORDS).splitlines():
        commit, date = line.split()
        # The file has moved, so a commit has it at one of the two paths, or has deleted it.
        contents = [_git(root, "show", f"{commit}:{path}") for path in RECORDS]
        content = next((text for text in contents if text), '{"pods": []}')
        yield commit, date, json.loads(content)["pods"]


def _git(root: Path, *words: str) -> str:
    """Return the output of a git command in a checkout; empty if the command fails."""
    completed = subprocess.run(
        ["git", "-C", root, *words], capture_output=True, text=True, check=False
    )
    return completed.stdout.rstrip()
