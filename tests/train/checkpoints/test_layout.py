"""Checkpoints where no folder can be renamed, a bucket or a mounted one: the manifest alone makes one, markers do the rest."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from mupax import buckets
from mupax.disk import DiskError, path_of
from mupax.train.checkpoints import command
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import steps, verified
from mupax.train.checkpoints.layout import MANIFEST, quarantined, renames_folders
from mupax.train.checkpoints.workdir import WorkdirError
from mupax.train.config.sections import CheckpointConfig
from tests.fixtures.emulator import bucket, emulator
from tests.train.checkpoints.test_manifest import (
    FACTS,
    data_file,
    flip,
    notes_of_restoring,
    restored,
    save,
    state_at,
)

__all__ = ["bucket", "emulator"]  # fixtures


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this machine in which no folder can be renamed, as in a mounted bucket."""
    replace, rename = os.replace, os.rename

    def files_only(how, source, target, **more):
        if os.path.isdir(source) and str(source).startswith(str(tmp_path)):
            raise OSError(errno.ENOSYS, "Function not implemented")
        how(source, target, **more)

    monkeypatch.setattr(os, "replace", lambda *words, **more: files_only(replace, *words, **more))
    monkeypatch.setattr(os, "rename", lambda *words, **more: files_only(rename, *words, **more))
    return tmp_path


@pytest.fixture(params=["bucket", "mounted"])
def workdir(request: pytest.FixtureRequest) -> Path:
    """An empty workdir where no folder can be renamed."""
    place = request.getfixturevalue(request.param)
    folder = place / "run" if request.param == "mounted" else path_of(f"{place}/run")
    assert not renames_folders(folder)
    return folder


@pytest.fixture(scope="module")
def first() -> dict[type[Path], dict[str, bytes]]:
    """Files that the first run left, by path, for each kind of folder."""
    return {}


@pytest.fixture
def saved(workdir: Path, first: dict[type[Path], dict[str, bytes]]) -> Path:
    """A run with the checkpoints 3 and 5, of three that were saved; a copy of the first such run there."""
    if type(workdir) not in first:
        save(workdir, 2, 3, 5)
        (workdir / "config.json").write_text('{"config": {}}')
        files = [path for path in workdir.rglob("*") if path.is_file()]
        first[type(workdir)] = {
            path.relative_to(workdir).as_posix(): path.read_bytes() for path in files
        }
    else:
        for name, content in first[type(workdir)].items():
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_bytes(content)
    return workdir


def left(workdir: Path) -> set[str]:
    return {
        path.relative_to(workdir).parts[1]
        for path in (workdir / "checkpoints").rglob("*")
        if path.is_file()
    }


def test_every_bit_comes_back_and_the_oldest_is_deleted(saved: Path) -> None:
    assert notes_of_restoring(saved, 5) == []
    assert left(saved) == {"3", "5"}
    assert verified(saved / "checkpoints" / "5").step == 5


def test_control_a_folder_on_a_disk_can_be_renamed(tmp_path: Path) -> None:
    assert renames_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_before_the_manifest_counts_for_nothing(saved: Path) -> None:
    folder = saved / "checkpoints"
    (folder / "5" / MANIFEST).unlink()
    (folder / "5.saving").write_text("")
    assert notes_of_restoring(saved, 3) == []
    assert left(saved) == {"3"}


def test_what_a_kill_leaves_behind_the_manifest_counts(saved: Path) -> None:
    (saved / "checkpoints" / "5.saving").write_text("")
    notes_of_restoring(saved, 5)
    assert left(saved) == {"3", "5"}


def test_a_checkpoint_loses_its_manifest_before_anything_else(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    unlink = type(saved).unlink

    def noted(self: Path, **how: bool) -> None:
        gone.append(self.name)
        unlink(self, **how)

    monkeypatch.setattr(type(saved), "unlink", noted)
    monkeypatch.setattr(
        "mupax.train.checkpoints.layout.delete_tree", lambda path: gone.append(path.name)
    )
    with Checkpoints(saved, CheckpointConfig(keep=2)) as checkpoints:
        gone.clear()
        checkpoints.layout.delete(3)
    assert gone == [MANIFEST, "3", "3.saving"]
    assert steps(saved / "checkpoints") == [5]


def test_a_damaged_one_is_marked_and_taken_back_once_whole(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved / "checkpoints"
    file = data_file_of(folder / "5")
    whole = file.read_bytes()
    flip(file)
    notes = notes_of_restoring(saved, 3)
    assert "checkpoint 5 is damaged" in notes[0]
    assert "set aside as checkpoints/5/damaged.json, going back to checkpoint 3" in notes[0]
    assert json.loads((folder / "5" / "damaged.json").read_text())["step"] == 5
    assert (steps(folder), [path.name for path in quarantined(folder)]) == ([3], ["5"])
    assert command.main([str(saved)]) == 0
    assert "set aside, " in capsys.readouterr().out
    flip(data_file_of(folder / "3"))
    with pytest.raises(
        WorkdirError, match=r"those set aside \(3, 5\) were read again and are damaged"
    ):
        restored(saved)
    file.write_bytes(whole)
    notes = notes_of_restoring(saved, 5)
    assert any("checkpoint 5, set aside as 5, is whole: taken back" in note for note in notes)


def test_a_damaged_one_that_cannot_be_set_aside_is_named_with_the_one_before_it(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    moved = tmp_path / "moved"
    save(moved, 3, 5)
    places = [saved]
    if renames_folders(moved):  # not on the mounted folder
        places.append(moved)
    for workdir in places:
        flip(data_file_of(workdir / "checkpoints" / "5"))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            patch.setattr(buckets.BucketPath, "write_bytes", fail)
            patch.setattr(buckets.BucketPath, "write_text", fail)
            with pytest.raises(DiskError) as caught:
                restored(workdir)
        text = str(caught.value)
        assert text.startswith("checkpoint 5 is damaged (")
        assert "cannot be set aside: " in text
        assert "No space left on device; see to the disk" in text
        assert "goes back to checkpoint 3" in text
        assert steps(workdir / "checkpoints") == [3, 5]
        # The same command again, when the disk is well.
        notes_of_restoring(workdir, 3)


def test_the_next_of_the_same_step_takes_the_place_of_a_damaged_one(saved: Path) -> None:
    flip(data_file_of(saved / "checkpoints" / "5"))
    restored(saved)
    save(saved, 5)
    notes_of_restoring(saved, 5)
    assert quarantined(saved / "checkpoints") == []


def test_a_manifest_that_somebody_deleted_is_damage(saved: Path) -> None:
    (saved / "checkpoints" / "5" / MANIFEST).unlink()
    notes = notes_of_restoring(saved, 3)
    assert "checkpoint 5 is damaged: manifest.json is missing" in notes[0]
    assert left(saved) == {"3", "5"}


def test_errors_of_a_bucket_are_those_of_a_disk(bucket: str) -> None:
    path = path_of(f"{bucket}/folder/file")
    with pytest.raises(FileNotFoundError, match="no such object"):
        path.read_bytes()
    assert list(path.parent.iterdir()) == []
    assert isinstance(path.parent, buckets.BucketPath)
    assert path.absolute() == path


def data_file_of(step: Path) -> Path:
    """The file that the arrays are in."""
    if isinstance(step, Path):
        return data_file(step)
    return max(
        (path for path in step.rglob("*") if "/d/" in str(path)),
        key=lambda path: path.stat().st_size,
    )


@pytest.fixture(params=["disk", "mounted"])
def two_saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run with the checkpoints 2 and 3, in folders that can be renamed or not."""
    if request.param == "mounted":
        request.getfixturevalue("mounted")
    save(tmp_path / "run", 2, 3)
    return tmp_path / "run"


@pytest.mark.parametrize("half", [False, True], ids=["at once", "half way"])
def test_a_checkpoint_is_saved_whatever_becomes_of_an_older_one(
    half: bool, two_saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    with Checkpoints(two_saved, CheckpointConfig(keep=2), log=notes.append) as checkpoints:
        layout = type(checkpoints.layout)

        def refuse(*_: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        with monkeypatch.context() as patch:
            if half:
                patch.setattr("mupax.train.checkpoints.layout.delete_tree", refuse)
            else:
                patch.setattr(layout, "delete", refuse)
            for step in (5, 7):
                checkpoints.save(step, state_at(step), FACTS)
                assert checkpoints.wait() is None
        assert [note for note in notes if "could not be saved" in note] == []
        told = [note for note in notes if "checkpoints/2" in note]
        assert len(told) == 1
        assert "Permission denied" in told[0]
        assert {5, 7} <= set(steps(two_saved / "checkpoints"))
        checkpoints.save(9, state_at(9), FACTS)
        assert checkpoints.wait() is None
    assert left(two_saved) == {"7", "9"}
    notes_of_restoring(two_saved, 9)


def test_a_checkpoint_that_is_being_saved_is_not_damaged(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved / "checkpoints"
    whole = (folder / "5" / MANIFEST).read_bytes()
    (folder / "5" / MANIFEST).unlink()
    assert command.main([str(saved)]) == 1  # control: without the mark of a save something is wrong
    assert "damaged: manifest.json is missing" in capsys.readouterr().out
    (folder / "5.saving").write_text("")
    assert command.main([str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "being saved" in shown
    assert "damaged" not in shown
    (folder / "5" / MANIFEST).write_bytes(whole)
    assert command.main([str(saved)]) == 0
    assert "being saved" not in capsys.readouterr().out
