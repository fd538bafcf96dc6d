"""The page of the pods: what is compiled, what is read, and what stays of old figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT
from scripts.bench import commits, pods
from scripts.pages import markdown

COMMITTED = {
    (r["recipe"], r["topology"]): r
    for r in json.loads((ROOT / "docs" / "evidence" / "pods.json").read_text())["pods"]
}
POD = pods.PODS[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docs folder with the committed figures."""
    (tmp_path / "pods.json").write_text((ROOT / "docs" / "evidence" / "pods.json").read_text())
    monkeypatch.setattr(pods, "RECORD", tmp_path / "pods.json")
    monkeypatch.setattr(pods, "PAGE", tmp_path / "launch.md")
    return tmp_path


def figures(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (r["recipe"], r["topology"]): r
        for r in json.loads((folder / "pods.json").read_text())["pods"]
    }


def test_the_committed_section_is_what_its_figures_make(folder: Path) -> None:
    section = pods.document(json.loads((folder / "pods.json").read_text()))
    _, committed, _ = markdown.parts((ROOT / "docs" / "howto" / "launch.md").read_text(), "pods")
    assert committed.strip() == section.strip()


def test_one_pod_is_compiled_and_the_others_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(
        pods,
        "compiled",
        lambda *pod: compiled.append(pod) or {**COMMITTED[pod], "estimated_cycles": 12_345},
    )
    assert pods.main(["--only", " ".join(POD)]) == 0
    assert compiled == [POD]
    assert figures(folder) == {**COMMITTED, POD: {**COMMITTED[POD], "estimated_cycles": 12_345}}
    assert "| 12,345 |" in (folder / "launch.md").read_text()


def test_a_report_from_a_file_is_taken_as_of_this_program(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = {"commit": "1234567", "date": "2026-11-24"}
    monkeypatch.setattr(commits, "head", lambda root: program)
    report = tmp_path / "report.json"
    report.write_text(json.dumps({**COMMITTED[POD], "estimated_cycles": 54_321, "program": None}))
    assert pods.main(["--json", str(report)]) == 0
    after = figures(folder)
    assert after[POD]["estimated_cycles"] == 54_321
    assert after[POD]["program"] == program
    assert {pod: row for pod, row in after.items() if pod != POD} == {
        pod: row for pod, row in COMMITTED.items() if pod != POD
    }


def test_without_a_choice_every_pod_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    pod_row = COMMITTED[POD]

    def report(recipe: str, topology: str) -> dict[str, Any]:
        compiled.append((recipe, topology))
        return {**pod_row, "recipe": recipe, "topology": topology}

    monkeypatch.setattr(pods, "compiled", report)
    monkeypatch.setattr(pods, "preset_cost", lambda *case: {"case": case})
    monkeypatch.setattr(pods, "_preset_cost", lambda rows: [str(len(rows))])
    assert pods.main([]) == 0
    assert compiled == list(pods.PODS) == list(figures(folder))
