"""Words of the commands in scripts/: none is ignored."""

from __future__ import annotations

import ast
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest

from mupax.train.checkpoints.workdir import locked
from mupax.train.parallel.processes import Processes, StopRequest
from mupax.train.studies.sweep.work import Stopped
from scripts import ROOT, harness

OWN_WORDS = {
    "campaigns/edges/folders.py": "starts a session by a name that the campaign gives",
    "campaigns/injection/emulator.py": "runs the command that follows",
    "campaigns/injection/object_faults.py": "is started by the campaign with a port and numbers",
    "launch/ray_train.py": "hands its words on to `mupax train`",
    "pages/leaderboard.py": "hands the words of a study on to `mupax transfer`",
    "studies/published_runs.py": "calls tyro itself",
}
"""Commands that read their words themselves."""

BADGES = ROOT / "docs" / "images" / "badges"
"""Files that `python -m scripts.pages.badges`, a command without flags, writes."""

pytestmark = pytest.mark.core


def _run(module: str, word: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a module of scripts/ with a word in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", [module, word])
    # Another test may have imported the module, of which `runpy` would warn.
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return ended.value.code


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_of_a_command_without_flags_writes_nothing(
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    written = {path: path.stat().st_mtime_ns for path in BADGES.iterdir()}
    source = (ROOT / "scripts/pages/badges.py").read_text()
    docstring = str(ast.get_docstring(ast.parse(source), clean=False))
    assert _run("scripts.pages.badges", word, monkeypatch) == 0
    assert capsys.readouterr().out.strip() == docstring.strip()
    assert {path: path.stat().st_mtime_ns for path in BADGES.iterdir()} == written


def test_words_of_a_command_without_flags_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("scripts.pages.badges", "--out", monkeypatch) == 2
    message = "error: '--out' is not known; write `python -m scripts.pages.badges` alone"
    assert capsys.readouterr().err.startswith(message)


def test_every_command_reads_its_words() -> None:
    ignoring = []
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        text = path.read_text()
        reads = "parse(" in text or "refuse_words()" in text
        name = path.relative_to(ROOT / "scripts").as_posix()
        if '__name__ == "__main__"' in text and not reads:
            ignoring.append(name)
    assert ignoring == sorted(OWN_WORDS)


def test_a_study_whose_folder_is_in_use_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(_: StopRequest) -> None:
        with locked(tmp_path, Processes()), locked(tmp_path, Processes()):
            raise AssertionError("two processes work in one folder")

    with pytest.raises(SystemExit) as ended:
        harness.run_study(train)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the workdir {tmp_path} is in use")
    assert len(error.splitlines()) == 1


def test_a_study_that_a_signal_stops_says_how_it_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(stop: StopRequest) -> None:
        signal.raise_signal(signal.SIGTERM)
        if stop.received is not None:
            raise Stopped

    assert harness.run_study(train) == 128 + signal.SIGTERM
    assert "the same command goes on" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["record.json", "record.json.gz"])
def test_a_record_is_read_back_and_the_same_text_gives_the_same_bytes(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    rows = [{"study": number, "passed": True} for number in range(99)]
    text = harness.with_rows({"command": "a"}, "rows", rows)
    harness.write_record(path, text)
    assert harness.read_rows(path, "rows") == rows
    content = path.read_bytes()
    assert (len(content) < len(text) / 2) == name.endswith(".gz")
    # A date in the file would change the bytes.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1.0)
        harness.write_record(path, text)
    assert path.read_bytes() == content
