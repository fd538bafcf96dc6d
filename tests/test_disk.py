"""A slow disk is given time, and a stranger's broken JSON is refused by name."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from mupax import disk
from mupax.disk import DiskError, JsonError, read_json

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "too deep"),
        (b'{"a":' * 200_000, "too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"a": 1e999}', "beyond all that can be stored"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"", "not JSON"),
    ],
)
def test_json_that_is_none_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(JsonError, match=message):
        read_json(tmp_path / "x.json")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # reading it would wait for ever
    with pytest.raises(JsonError, match="no such file"):
        read_json(tmp_path / "config.json")


def test_an_error_is_tried_again_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_PAUSES_S", (0.001, 0.002))
    errors: list[Exception] = [
        OSError(5, "Input/output error"),
        ValueError("x [os_error_code='116']"),
        OSError(13, "no"),
    ]
    notes: list[str] = []

    def read() -> str:
        if errors:
            raise errors.pop()
        return "content"

    assert disk.Patience(notes.append)(read, "file") == "content"
    assert notes == ["file cannot be read: no; trying again for 30 s"]


def test_an_error_that_stays_ends_with_a_failure_and_nothing_else_is_tried_again() -> None:
    def failing(error: Exception) -> str:
        calls.append(error)
        raise error

    for error, expected in (
        (OSError(5, "Input/output error"), DiskError),
        (FileNotFoundError(2, ""), FileNotFoundError),
    ):
        calls: list[Exception] = []
        with pytest.raises(expected):
            disk.Patience(print, seconds=0.25)(lambda error=error: failing(error), "file")
        assert len(calls) == (2 if expected is DiskError else 1)
    with pytest.raises(ValueError, match="of another kind"):
        disk.Patience(print)(lambda: failing(ValueError("of another kind")), "file")


def test_nothing_there_is_no_fault(tmp_path: Path) -> None:
    assert disk.status(tmp_path / "a") is None
    assert disk.names(tmp_path / "a") == []
    assert disk.names(tmp_path) == []


def test_json_is_refused_that_is_nested_deeper_than_functions_go(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": ' + "[" * (disk.DEEPEST - 1) + "]" * (disk.DEEPEST - 1) + "}")
    assert read_json(file)
    file.write_text('{"a": ' + "[" * disk.DEEPEST + "]" * disk.DEEPEST + "}")
    with pytest.raises(JsonError, match="deeper"):
        read_json(file)


@pytest.mark.parametrize(
    "name", ["n" * 255, "\u00e9" * 127, os.fsdecode(b"\xff" * 255)], ids=["n", "e", "bytes"]
)
def test_a_file_with_the_longest_name_is_written(name: str, tmp_path: Path) -> None:
    disk.write_whole(tmp_path / name, "content")
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "content"


def test_a_copy_is_of_all_that_the_source_has_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    (source / "inner" / "empty").mkdir(parents=True)
    (source / "inner" / "file").write_text("content")
    (source / "dangling").symlink_to("nowhere")
    disk.copy(source, tmp_path / "target")
    assert sorted(tmp_path.glob("target/**/*")) == [
        tmp_path / "target" / "inner",
        tmp_path / "target" / "inner" / "file",
    ]
    with pytest.raises(FileNotFoundError, match="missing"):
        disk.copy(tmp_path / "missing", tmp_path / "target")

    scandir = os.scandir

    def unreadable(path: str) -> object:
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", unreadable)
    with pytest.raises(PermissionError, match="inner"):
        disk.copy(source, tmp_path / "again")


def test_a_number_that_is_not_finite_is_null_at_any_depth() -> None:
    value = {"a": [math.nan, {"b": (math.inf, 1.5)}], "c": -math.inf, "d": True, "e": 3}
    text = disk.json_text(value)
    assert text == '{"a": [null, {"b": [null, 1.5]}], "c": null, "d": true, "e": 3}'
    assert disk.json_object(text.encode(), "text")
