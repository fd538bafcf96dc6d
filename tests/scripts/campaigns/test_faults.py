"""Runs on a failing disk, in short, and the shim that makes operations fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.campaigns import PAGE, faults
from scripts.campaigns.injection import shim
from tests.scripts.campaigns.campaign import campaigns


@pytest.mark.slow
def test_runs_end_as_the_undisturbed_one(tmp_path: Path) -> None:
    if shim.compiled(tmp_path) is None:
        pytest.skip("there is no C compiler (cc) for scripts/campaigns/injection/faults.c")
    rows = campaigns(tmp_path, {"faults": "--count 2"})["faults"]
    assert {row["phase"] for row in rows} == {"new", "going on"}
    assert sum(bool(row["fired"]) for row in rows) >= 2
    assert "**2 of 2 runs ended bitwise" in (tmp_path / "faults.md").read_text()


WRITE = """
import os
for _ in range(4):
    try:
        with open("sick/file", "wb", buffering=0) as file:
            print(file.write(b"0123456789"), os.stat("sick/file").st_size)
    except OSError as error:
        print(error.errno, os.stat("sick/file").st_size)
"""
CALLS = {
    "write": WRITE,
    "read": WRITE.replace('"wb"', '"rb"').replace(
        'write(b"0123456789")', "readinto(bytearray(10))"
    ),
}
"""Programs that do an operation four times, by its kind."""


@pytest.mark.core
def test_the_shim_fails_the_operation_that_is_chosen(tmp_path: Path) -> None:
    library = shim.compiled(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler (cc) for scripts/campaigns/injection/faults.c")
    (tmp_path / "sick").mkdir()
    control = shim.Control(tmp_path / "control", library)
    expected = {
        ("write", "EIO"): "5 0",
        ("write", "ENOSPC"): "28 0",
        ("write", "short"): "5 5",
        ("write", "torn"): "5 5",
        ("write", "slow"): "10 10",
        ("read", "ESTALE"): "116 10",
        ("read", "short"): "5 10",
    }
    for (kind, effect), line in expected.items():
        control.watch(tmp_path / "sick")
        control.arm(kind, effect, 2, milliseconds=10)
        run = subprocess.run(
            [sys.executable, "-c", CALLS[kind]],
            cwd=tmp_path,
            env=control.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.splitlines() == ["10 10", "10 10", line, "10 10"], effect
        assert (control.calls()[kind], control.fired) == (4, 1)


@pytest.mark.core
def test_the_committed_table_is_whole() -> None:
    rows = json.loads(PAGE.with_name("faults.json").read_text())
    struck = [row for row in rows if row["fired"]]
    assert len(struck) >= 300
    assert not [row for row in struck if row["wrong"]]
    assert {row["kind"] for row in struck} == {*faults.READING, *faults.WRITING}
    assert {row["effect"] for row in struck} == set().union(*faults.EFFECTS.values())
    assert max(row["seconds"] for row in struck) < faults.BOUND_S
    assert faults.page(rows) in PAGE.read_text()
