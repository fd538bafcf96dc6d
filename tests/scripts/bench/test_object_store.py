"""The cost of a bucket: the benchmark's run, and the committed figures are within what is promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.bench.runs import object_store
from tests.fixtures.emulator import bucket, emulator

__all__ = ["bucket", "emulator"]  # fixtures
RECORD = ROOT / "docs" / "performance" / "object_store.json"


def test_a_run_in_a_bucket_is_timed(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = object_store.FLAGS.format(width=16, depth=1).split()
    step, run, cpu = object_store.run([*words, "--steps", "3"], f"{bucket}/run")
    assert 0 < step < run
    assert cpu > 0


def test_the_committed_figures_are_within_bounds() -> None:
    record = json.loads(RECORD.read_text())
    assert (record["steps"], record["step"]["rounds"]) == (object_store.STEPS, 7)
    assert record["step"]["ratio"]["disk"] <= 1.1
