"""The campaign of failing processes in short: one cannot write, and all end with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.campaigns import PAGE, processes
from tests.scripts.campaigns.campaign import campaign


@pytest.mark.slow
def test_processes_end_with_the_reason_of_the_one_that_failed_and_go_on_bitwise(
    tmp_path: Path,
) -> None:
    only = "--only 'full disk saving'"
    rows = campaign(processes, f"--failures 1 --folder {tmp_path} {only}", tmp_path)["rows"]
    assert [(row["failure"], row["codes"], row["wrong"]) for row in rows] == [
        ("full disk", [1, 1], []),  # which nobody else sees
    ]
    assert all(row["ended_s"] < processes.BOUND_S for row in rows)


@pytest.mark.core
def test_the_committed_campaign_is_what_its_page_says() -> None:
    rows = json.loads(PAGE.with_name("processes.json").read_text())["rows"]
    assert processes.page(rows) in PAGE.read_text()
    assert {row["failure"] for row in rows} == {failure.name for failure in processes.FAILURES}
    assert not [row for row in rows if row["wrong"]]
