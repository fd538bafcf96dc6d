"""The campaigns of killed and of failing processes in short, and what is committed of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from scripts.campaigns import PAGE, kills, processes, tiny_runs
from tests.scripts.campaigns.campaign import campaigns

WITHOUT_PLOT = """
from pathlib import Path
from mupax.train.run.report import finish
finish.loss_plot = lambda metrics, image, *_, **__: Path(image).touch()
"""
"""Drawing takes longer than the steps of a tiny run. The forks of the campaigns inherit this."""


@pytest.mark.slow
def test_killed_and_failing_runs_end_as_the_undisturbed_ones(tmp_path: Path) -> None:
    flags = f"--folder {tmp_path}"
    words = {
        # tests/scripts/campaigns/test_operations.py kills a resumed run again.
        "kills": f"--kills 1 --most 1 --steps 80 --processes 1 --models decoder {flags}",
        # Nobody else sees that a disk is full.
        "processes": f"--failures 1 --only 'full disk saving' {flags}",
    }
    records = campaigns(tmp_path, words, WITHOUT_PLOT)

    rows = records["processes"]["rows"]
    facts = [(row["failure"], row["codes"], row["wrong"]) for row in rows]
    assert facts == [("full disk", [1, 1], [])]
    assert all(row["ended_s"] < processes.BOUND_S for row in rows)

    runs = records["kills"]["runs"]
    assert sum(len(run["kills"]) for run in runs) >= 1
    assert not any(run["differences"] for run in runs)
    assert f"**{len(runs)} of {len(runs)} runs ended" in (tmp_path / "kills.md").read_text()

    # Control: the comparison sees another digest and a missing row.
    result = tiny_runs.run_result(tmp_path / "decoder-1", 80)
    assert not tiny_runs.differences(result, tiny_runs.run_result(tmp_path / "decoder-1-0", 80))
    assert len(result["rows"]) == 80 + 3
    flipped = copy.deepcopy(result)
    name, entry = next(iter(flipped["arrays"].items()))
    changed = json.dumps(entry).replace("a", "b", 1).replace("0", "1", 1)
    flipped["arrays"][name] = json.loads(changed)
    assert tiny_runs.differences(result, flipped) == [name]
    shorter = {**result, "rows": result["rows"][:-1]}
    assert tiny_runs.differences(result, shorter)[0].startswith("rows: ")


@pytest.mark.core
def test_the_committed_kills_are_what_their_page_says() -> None:
    runs = json.loads(PAGE.with_name("kills.json").read_text())["runs"]
    assert kills.page(runs) in PAGE.read_text()
    assert sum(len(run["kills"]) for run in runs) >= 200
    cases = {(run["model"], run["processes"]) for run in runs}
    assert cases == {(case.model, case.processes) for case in tiny_runs.CASES}
    assert not [run for run in runs if run["differences"]]


@pytest.mark.core
def test_the_committed_failures_are_what_their_page_says() -> None:
    rows = json.loads(PAGE.with_name("processes.json").read_text())["rows"]
    assert processes.page(rows) in PAGE.read_text()
    assert {row["failure"] for row in rows} == {failure.name for failure in processes.FAILURES}
    assert not [row for row in rows if row["wrong"]]
