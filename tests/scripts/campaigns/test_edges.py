"""Campaigns at the edges: results are kept, faults are counted, and the page is made of them."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.campaigns import PAGE
from scripts.campaigns.edges import __main__ as edges
from scripts.campaigns.edges.trial import Ended, Outcome, Trial, judge


@pytest.mark.core
def test_a_trial_with_a_result_is_not_run_again_and_a_fault_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(name: str, verdict: str) -> Trial:
        def body(folder: Path) -> Outcome:
            started.append(name)
            return Outcome(verdict, "detail")

        return Trial(name, "group", body)

    campaign = types.SimpleNamespace(
        trials=lambda shared, seed: [run("good", "ok"), run("bad", "lost")]
    )
    monkeypatch.setattr(edges.importlib, "import_module", lambda name: campaign)
    assert edges.main(["paths", "--only", "good", "--docs", str(tmp_path)]) == 0
    assert edges.main(["paths", "--docs", str(tmp_path)]) == 1
    assert edges.main(["paths", "--docs", str(tmp_path)]) == 1
    assert started == ["good", "bad"]
    assert (
        f"| {edges.CAMPAIGNS['paths']} | 2 | 1 | 1 |" in (tmp_path / "reliability.md").read_text()
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        (Ended(2, "error: the path is odd", 1.0), "ok"),
        (Ended(1, "error: the path is odd", 1.0), "wrong"),
        (Ended(None, "", 60.0), "hung"),
        (Ended(-11, "", 1.0), "crash"),
        (Ended(2, "*** SIGSEGV received", 1.0), "crash"),
        (Ended(2, "Traceback (most recent call last):", 1.0), "traceback"),
    ],
)
def test_exit_code_and_output_are_judged(ended: Ended, verdict: str) -> None:
    assert judge(ended, codes=[2]).verdict == verdict


@pytest.mark.core
def test_the_committed_results_have_no_fault_and_are_what_the_page_says() -> None:
    results = edges.read_results(ROOT / "docs" / "evidence")
    assert edges.page(results) in PAGE.read_text()
    faults = {(name, row["verdict"]) for name, rows in results.items() for row in rows.values()} & {
        (name, fault) for name in edges.CAMPAIGNS for fault in edges.FAULTS
    }
    assert not faults, json.dumps(sorted(faults))
