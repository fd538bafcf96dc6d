"""The commit that a compiled figure is of, in a checkout made here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.bench import commits


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", root, *who, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def report_of(cycles: int) -> dict[str, object]:
    step = {"recipe": "lm-8b", "topology": "v5e:16x16"}
    return {**step, "estimated_cycles": cycles, "compile_seconds": 3.0}


def committed(root: Path, cycles: int, text: str) -> dict[str, str]:
    """The commit of a step with so many cycles, and its day."""
    file = root / "docs" / "evidence" / "pods.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"pods": [report_of(cycles)], "text": text}))
    git(root, "add", "-A")
    git(root, "commit", "-m", text, "--date", "2026-01-02T00:00:00")
    return dict(
        zip(("commit", "date"), git(root, "log", "-1", "--format=%h %cs").split(), strict=True)
    )


def test_a_report_is_of_the_first_commit_that_has_its_figures(tmp_path: Path) -> None:
    git(tmp_path, "init")
    committed(tmp_path, 5, "first")
    compiled = committed(tmp_path, 7, "compiled again")
    last = committed(tmp_path, 7, "another page")
    assert compiled["commit"] != last["commit"]
    report = report_of(7)
    assert commits.first_committed(report, tmp_path) == compiled
    assert commits.first_committed(report_of(8), tmp_path) is None
    assert commits.first_committed(report, tmp_path / "docs" / "none") is None
    assert commits.head(tmp_path) == last


def test_a_commit_that_deletes_the_reports_has_none(tmp_path: Path) -> None:
    git(tmp_path, "init")
    committed(tmp_path, 7, "first")
    (tmp_path / commits.RECORDS[0]).unlink()
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "deleted")
    assert commits.first_committed(report_of(7), tmp_path) is None
    again = committed(tmp_path, 7, "again")
    assert commits.first_committed(report_of(7), tmp_path) == again


def test_what_is_not_committed_has_no_figures(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "step.py").write_text("x = 1\n")
    committed(tmp_path, 5, "first")
    (tmp_path / "step.py").write_text("x = 2\n")
    with pytest.raises(SystemExit, match=r"commit first what a step is made of[^$]*step\.py"):
        commits.head(tmp_path)
