"""The cost of saving: the benchmark runs, and the committed figures are within what is promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.bench.runs import save_cost

RECORD = ROOT / "docs" / "performance" / "save_cost.json"


@pytest.mark.slow
def test_the_benchmark_saves_and_restores(tmp_path: Path) -> None:
    assert save_cost.main(["--tiny", "--rounds", "1", "--json", str(tmp_path / "a.json")]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert record.keys() == json.loads(RECORD.read_text()).keys()
    assert all(value > 0 for value in record["ms"].values())


def test_the_committed_figures_are_within_bounds() -> None:
    record = json.loads(RECORD.read_text())
    assert 0.99e8 < record["state_bytes"] < 1.1e8
    assert record["interval_steps"] == save_cost.CheckpointConfig().every_steps
    assert record["ratio"]["save_call / host_copy"] <= 1.5
    assert record["ratio"]["digests / write"] < 0.1
    assert record["ratio"]["lost / interval"] <= 0.01
