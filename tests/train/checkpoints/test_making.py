"""Folders that a command makes: whole or not at all, whatever a killed command or a full disk has left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mupax.disk import path_of
from mupax.train.checkpoints import making, workdir
from mupax.zoo.huggingface import tensorfile
from tests.fixtures.commands import command, refusal, succeeded
from tests.fixtures.emulator import bucket, emulator
from tests.train.reuse.test_source import published

__all__ = ["bucket", "emulator"]  # fixtures

pytestmark = pytest.mark.core

COMMAND = ["mupax", "import", "weights", "--out", "out"]
ENTRIES = {workdir.MARK, "model.json", "model.safetensors"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which holds weights as they are published."""
    published(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def half_made(folder: Path, entries: Sequence[str] = ()) -> None:
    """Leave what a killed import leaves in a folder, with entries that are not whole."""
    folder.mkdir(parents=True, exist_ok=True)
    workdir.write_mark(folder, COMMAND, entries, complete=False)
    for name in entries:
        (folder / name).write_bytes(b"half of")


def killed_before_rename() -> None:
    half_made(Path(".out.making"))
    Path(".out.making/model.safetensors").write_bytes(b"half of")


def inside() -> None:
    half_made(Path("out"), ["model.safetensors"])
    Path("out/.making").mkdir()
    Path("out/.making/model.json").write_bytes(b"half of")


def half_mark() -> None:
    Path("out").mkdir()
    Path("out", f".{workdir.MARK}.partial").write_bytes(b"{")


@pytest.mark.parametrize(
    "left", [killed_before_rename, inside, half_mark], ids=["beside", "inside", "half of a mark"]
)
def test_the_same_command_makes_a_folder_of_which_a_kill_left_half(left: Any, here: Path) -> None:
    left()
    succeeded("import weights --out out")
    assert names(here) == {"weights", "out"}
    assert names(here / "out") == ENTRIES
    succeeded("export out --out again")
    copies = [here / name / "model.safetensors" for name in ("weights", "again")]
    assert copies[0].read_bytes() == copies[1].read_bytes()


READERS = (
    "train lm-tiny --workdir out --resume",
    "train lm-tiny --workdir out",
    "train --resume --workdir out",
    "train lm-tiny --init-from out --workdir new",
    "grow out --set width=64 --out new",
    "convert out --form plain --out new",
    "checkpoints out",
    "eval out",
    "generate out --prompt a",
    "generate out/checkpoints/5 --prompt a",
    "push out --to me/model --dry-run",
    "export out --out new",
    "import out --out new",
)


@pytest.mark.parametrize("reader", READERS)
def test_a_half_is_refused_with_the_command_to_write_again(reader: str, here: Path) -> None:
    half_made(here / "out")
    (here / "out" / "config.json").write_text(json.dumps({"config": {"recipe": "lm-tiny"}}))
    before = names(here / "out")
    assert "`mupax import weights --out out`" in refusal(reader)
    assert names(here / "out") == before
    assert list(here.glob("new/*.json")) == []


def test_control_a_folder_of_an_older_version_has_no_mark_and_is_read(here: Path) -> None:
    succeeded("import weights --out out")
    (here / "out" / workdir.MARK).unlink()
    succeeded("export out --out again")


@pytest.mark.parametrize("there", [False, True], ids=["missing", "empty"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full disk", "Ctrl-C"]
)
def test_a_command_that_fails_leaves_nothing(
    there: bool, error: BaseException, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (here / "out").mkdir()
    before = names(here)

    def fail(arrays: object, file: Path, **_: object) -> None:
        file.write_bytes(b"half of")
        if isinstance(error, OSError):
            raise tensorfile.SafetensorError("I/O error: No space left on device (os error 28)")
        raise error

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(tensorfile, "save_file", fail)
        done = command("import weights --out out")
        assert done.code in (1, 130)
        assert isinstance(error, KeyboardInterrupt) or "No space left on device" in done.message
    assert names(here) == before
    assert not there or names(here / "out") == set()
    succeeded("import weights --out out")


def test_what_the_command_has_not_made_is_never_deleted(here: Path) -> None:
    inside()
    (here / "out" / "notes.txt").write_text("mine")
    assert "notes.txt" in refusal("import weights --out out")
    assert names(here / "out") == {workdir.MARK, ".making", "model.safetensors", "notes.txt"}
    shutil.rmtree(here / "out")
    (here / ".out.making").mkdir()
    (here / ".out.making" / "notes.txt").write_text("mine")
    assert ".out.making" in refusal("import weights --out out")
    assert (here / ".out.making" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", [".out.making", "out"])
def test_what_a_running_command_makes_is_left_to_it(place: str, here: Path) -> None:
    (killed_before_rename if place == ".out.making" else inside)()
    before = names(here / place)
    with (here / place / making.LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "being made by another command" in refusal("import weights --out out")
    assert names(here / place) == before | {making.LOCK}


def test_a_kill_in_the_last_moment_leaves_a_complete_folder(here: Path) -> None:
    succeeded("import weights --out out")
    (here / "out" / making.LOCK).touch()
    assert "not an empty folder" in refusal("import weights --out out --preset mup")
    (here / "out" / making.LOCK).touch()
    assert "out is complete" in succeeded("import weights --out out").message
    assert names(here / "out") == ENTRIES
    # Without the file the command had ended by itself.
    refusal("import weights --out out")


def test_in_a_bucket_the_mark_alone_tells(bucket: str, here: Path) -> None:
    out = path_of(f"{bucket}/out")
    workdir.write_mark(out, COMMAND, ["model.safetensors"], complete=False)
    (out / "model.safetensors").write_bytes(b"half of")
    assert "`mupax import weights --out out`" in refusal(f"export {out} --out again")
    succeeded(f"import weights --out {out}")
    assert names(out) == ENTRIES
    succeeded(f"export {out} --out again")


def test_a_copy_that_a_killed_process_left_is_deleted(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    left = {name: here / f"mupax-scratch-{name}" for name in ("abandoned", "running", "new")}
    for name, folder in left.items():
        folder.mkdir()
        (folder / making.LOCK).touch()
        if name != "new":
            os.utime(folder, (time.time() - 1000, time.time() - 1000))
    with (left["running"] / making.LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with making.scratch() as folder:
            assert names(folder) == set()
    assert names(here) == {"weights", "mupax-scratch-running", "mupax-scratch-new"}
