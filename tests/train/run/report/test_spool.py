"""Files of a run in a bucket: what has changed is uploaded, and what cannot be is kept."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from mupax import MupaxFailure, disk
from mupax.disk import path_of
from mupax.train.run.report import spool
from mupax.train.run.report.spool import UploadBuffer
from tests.fixtures.emulator import bucket, emulator

__all__ = ["bucket", "emulator"]  # fixtures


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are uploaded or fetched."""
    names, copy = [], disk.copy
    monkeypatch.setattr(
        disk, "copy", lambda source, target: (names.append(source.name), copy(source, target))
    )
    return names


def test_what_has_changed_is_sent_and_rows_are_fetched_again(
    bucket: str, copied: list[str]
) -> None:
    target = path_of(f"{bucket}/run")
    with UploadBuffer(target) as files:
        (files.folder / "metrics.jsonl").write_text("a\n")
        (files.folder / "tensorboard").mkdir()
        (files.folder / "tensorboard" / "events").write_text("e")
        files.send()
        files.send()
        assert sorted(copied) == ["events", "metrics.jsonl"]
        with (files.folder / "metrics.jsonl").open("a") as file:
            file.write("b\n")
        files.send_later().join()
        assert sorted(copied) == ["events", "metrics.jsonl", "metrics.jsonl"]
        (files.folder / "loss.png").write_text("p")
    assert {path.relative_to(target).as_posix() for path in target.rglob("*")} == {
        "loss.png", "metrics.jsonl", "tensorboard/events"
    }  # fmt: skip
    assert not files.folder.exists()
    with UploadBuffer(target) as files:
        assert [path.name for path in files.folder.iterdir()] == ["metrics.jsonl"]
        assert (files.folder / "metrics.jsonl").read_text() == "a\nb\n"


def test_a_picture_that_cannot_be_sent_stops_nothing_and_rows_are_kept(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    copy = disk.copy

    def refused(source: Path, target: Path) -> None:
        if disk.is_remote(target) and source.name in names:
            raise OSError(5, "Input/output error")
        copy(source, target)

    monkeypatch.setattr(disk, "copy", refused)
    names = ["loss.png"]
    with UploadBuffer(path_of(f"{bucket}/one")) as files:
        (files.folder / "loss.png").write_text("p")
        files.send()
    names = ["metrics.jsonl"]
    files = UploadBuffer(path_of(f"{bucket}/two"))
    (files.folder / "metrics.jsonl").write_text("a\n")
    with pytest.raises(OSError, match="Input/output"):
        files.send()
    with pytest.raises(MupaxFailure, match="cannot upload all rows to gs://"):
        files.__exit__(None, None, None)
    assert (next(tmp_path.glob("mupax-unsent-*")) / "metrics.jsonl").read_text() == "a\n"


def test_rows_are_kept_if_the_last_upload_fails_while_an_earlier_one_succeeds(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    copy = disk.copy
    copies: list[str] = []
    may_end = threading.Event()

    def first_alone(source: Path, target: Path) -> None:
        if disk.is_remote(target):
            copies.append(source.name)
            if len(copies) > 1:
                raise OSError(5, "Input/output error")
            may_end.wait(10)
        copy(source, target)

    monkeypatch.setattr(disk, "copy", first_alone)
    files = UploadBuffer(path_of(f"{bucket}/run"))
    rows = files.folder / "metrics.jsonl"
    rows.write_text("a\n")
    earlier = files.send_later()
    while not copies:
        time.sleep(0.01)
    rows.write_text("a\nb\n")
    # The earlier upload ends while the last one waits for it.
    threading.Timer(0.3, may_end.set).start()
    with pytest.raises(MupaxFailure, match="cannot upload all rows"):
        files.__exit__(None, None, None)
    earlier.join()
    assert (next(tmp_path.glob("mupax-unsent-*")) / "metrics.jsonl").read_text() == "a\nb\n"


def test_an_upload_without_end_does_not_keep_a_run(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(spool, "_PATIENCE_S", 0.2)
    files = UploadBuffer(path_of(f"{bucket}/run"))
    (files.folder / "metrics.jsonl").write_text("a\n")
    files._sending.acquire()
    with pytest.raises(MupaxFailure, match="they are in"):
        files.__exit__(None, None, None)
