"""Runs on a disk that is unwell, in short; and that a lost checkpoint or another number would be seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.campaigns import PAGE, faults
from scripts.campaigns.injection import shim
from tests.scripts.campaigns.campaign import campaign


@pytest.mark.slow
def test_runs_end_as_the_undisturbed_one(tmp_path: Path) -> None:
    if shim.compiled(tmp_path) is None:
        pytest.skip("there is no C compiler (cc) for scripts/campaigns/injection/faults.c")
    rows = campaign(faults, "--count 4", tmp_path)
    assert sum(bool(row["fired"]) for row in rows) >= 4
    assert "**4 of 4 ended bitwise" in (tmp_path / "page.md").read_text()


@pytest.mark.core
def test_the_shim_fails_the_operation_that_is_chosen(tmp_path: Path) -> None:
    library = shim.compiled(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler (cc) for scripts/campaigns/injection/faults.c")
    (tmp_path / "sick").mkdir()
    control = shim.Control(tmp_path / "control", library)
    code = (
        "import os, sys\n"
        "for k in range(4):\n"
        "    try:\n"
        "        with open('sick/file', 'wb', buffering=0) as file:\n"
        "            print(file.write(b'0123456789'), os.stat('sick/file').st_size)\n"
        "    except OSError as error:\n"
        "        print(error.errno, os.stat('sick/file').st_size)\n"
    )
    expected = {"EIO": "5 0", "ENOSPC": "28 0", "short": "5 5", "torn": "5 5", "slow": "10 10"}
    for effect, line in expected.items():
        control.watch(tmp_path / "sick")
        control.arm("write", effect, 2, milliseconds=10)
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=control.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.splitlines() == ["10 10", "10 10", line, "10 10"], effect
        assert (control.calls()["write"], control.fired) == (4, 1)


@pytest.mark.core
def test_the_committed_table_is_whole() -> None:
    rows = json.loads(PAGE.with_name("faults.json").read_text())
    struck = [row for row in rows if row["fired"]]
    assert len(struck) >= 300
    assert not [row for row in struck if row["wrong"]]
    assert {row["kind"] for row in struck} == {*faults.READING, *faults.WRITING}
    assert {row["effect"] for row in struck} == {
        effect for each in faults.EFFECTS.values() for effect in each
    }
    assert max(row["seconds"] for row in struck) < faults.BOUND_S
    assert faults.page(rows) in PAGE.read_text()
