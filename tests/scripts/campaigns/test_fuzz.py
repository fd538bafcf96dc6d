"""Broken files for every reader, in short; a crash and a hang would be counted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.campaigns import PAGE, fuzz, targets
from scripts.campaigns.targets import TARGETS, Target

INPUTS = 4


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "data"))


@pytest.mark.parametrize("name", TARGETS)
def test_broken_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    row = fuzz.fed(name, INPUTS, tmp_path)
    assert not fuzz.is_bad(row)
    assert row["read"] + row["refused"] == row["inputs"] == INPUTS


def test_a_folder_without_a_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="json with a tuned preset"):
        TARGETS["tuned preset"].read(tmp_path)


@pytest.mark.core
def test_control_what_is_wrong_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(folder: Path) -> Path:
        (folder / "x").write_bytes(b"good")
        return folder / "x"

    def read(folder: Path) -> Any:
        if (folder / "x").read_bytes() == b"good":
            return None
        return crash() if fault == "traceback" else spin()

    def crash() -> None:
        raise IndexError("of no reader")

    def spin() -> None:
        deadline = time.process_time() + 0.2
        while time.process_time() < deadline:
            pass

    monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    rows: dict[str, Any] = {}
    for fault in ("traceback", "slow"):
        monkeypatch.setitem(
            targets.TARGETS, fault, Target(make, read, (lambda content, choose: b"broken",))
        )
        rows[fault] = fuzz.fed(fault, 1, tmp_path)
        err = capsys.readouterr().err
        assert f"{fault}, broken: b'broken'" in err, err
    assert (rows["traceback"]["tracebacks"], rows["slow"]["hangs"]) == (1, 1), err
    assert "There were 1 tracebacks.\n" in fuzz.page(rows)
    assert "- 1 files took more than 0.1 s of processor time (" in fuzz.page(rows)


@pytest.mark.core
def test_the_committed_table_is_whole() -> None:
    rows = json.loads(PAGE.with_name("fuzz.json").read_text())
    assert set(rows) == set(TARGETS)
    assert sum(row["inputs"] for row in rows.values()) >= 10_000
    assert not [name for name, row in rows.items() if fuzz.is_bad(row)]
    assert fuzz.page(rows) in PAGE.read_text()
    for (
        name,
        row,
    ) in rows.items():  # the files are broken indeed, and some still hold what a reader takes
        assert row["read"] > 0, name
        assert row["refused"] > 0, name
