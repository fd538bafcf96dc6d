"""The fault campaign in short: real processes, killed at random moments, end as the one that was left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.campaigns import PAGE, kills, tiny_runs
from tests.scripts.campaigns.campaign import campaign


@pytest.mark.slow
def test_killed_runs_end_as_the_undisturbed_ones(tmp_path: Path) -> None:
    words = f"--kills 3 --most 3 --steps 80 --processes 1 --models decoder --folder {tmp_path}"
    runs = campaign(kills, words, tmp_path)["runs"]
    assert sum(len(run["kills"]) for run in runs) >= 3
    assert not any(run["differences"] for run in runs)
    assert f"**{len(runs)} of {len(runs)} runs ended" in (tmp_path / "page.md").read_text()

    # Control: what is compared does differ where a run is another one.
    mine = tiny_runs.run_result(tmp_path / "decoder-1", 80)
    assert not tiny_runs.differences(mine, tiny_runs.run_result(tmp_path / "decoder-1-0", 80))
    assert len(mine["rows"]) == 80 + 3
    flipped = json.loads(json.dumps(mine))
    name, entry = next(iter(flipped["arrays"].items()))
    flipped["arrays"][name] = json.loads(
        json.dumps(entry).replace("a", "b", 1).replace("0", "1", 1)
    )
    assert tiny_runs.differences(mine, flipped) == [name]
    flipped = {**mine, "rows": mine["rows"][:-1]}
    assert tiny_runs.differences(mine, flipped)[0].startswith("rows: ")


@pytest.mark.core
def test_the_committed_campaign_is_what_its_page_says() -> None:
    runs = json.loads(PAGE.with_name("kills.json").read_text())["runs"]
    assert kills.page(runs) in PAGE.read_text()
    assert sum(len(run["kills"]) for run in runs) >= 200
    assert {(run["model"], run["processes"]) for run in runs} == {
        (c.model, c.processes) for c in tiny_runs.CASES
    }
    assert not [run for run in runs if run["differences"]]
