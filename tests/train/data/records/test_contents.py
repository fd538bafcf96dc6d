"""Prepared data are told by content: a file that was replaced with the same size and time is prepared anew, a touched one is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mupax.train.data.records import contents
from tests.train.data.records.test_reading import opened, packed, text_of, write_records, write_text
from tests.train.data.sources.test_text import cache_folder

__all__ = ["cache_folder", "packed"]  # fixtures


def replaced(file: Path) -> None:
    """Write other content of the same size into a new file of the same name, size and time."""
    stat = file.stat()
    other = file.with_name("other")
    other.write_bytes(file.read_bytes().replace(b"number", b"letter"))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)


def rewritten(file: Path) -> None:
    """Write other content into the same file, and set its time back."""
    stat = file.stat()
    content = file.read_bytes().replace(b"number", b"letter")
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, rewritten])
@pytest.mark.parametrize("kind", ["text", "records"])
def test_changed_data_of_the_same_size_and_time_are_read_anew(
    tmp_path: Path, cache_folder: Path, kind: str, change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        contents, "_TICK_NS", -(10**12) if kind == "text" else 10**12
    )  # with a record and without
    file = tmp_path / "d" / ("a.txt" if kind == "text" else "a.jsonl")
    (write_text if kind == "text" else write_records)(tmp_path / "d", file.name)
    before = text_of(opened(f"{kind}:{tmp_path / 'd'}"))
    size = file.stat().st_size
    change(file)
    assert file.stat().st_size == size
    after = text_of(opened(f"{kind}:{tmp_path / 'd'}"))
    # Records are on the side of the split that their text tells.
    expected = [text.replace("number", "letter") for text in before]
    assert sorted("".join(after).splitlines()) == sorted("".join(expected).splitlines())


def test_control_a_touch_or_a_copy_prepares_nothing_anew(
    tmp_path: Path, packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_TICK_NS", -(10**12))
    write_text(tmp_path / "d", "a.txt")
    file = tmp_path / "d" / "a.txt"
    opened(f"text:{file}")
    before = packed()
    os.utime(file)
    opened(f"text:{file}")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    notes: list[str] = []
    opened(f"text:{file}", notes)
    assert packed() == before
    assert not any("packing" in note for note in notes)


def test_an_unchanged_file_is_not_read_again(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_TICK_NS", -(10**12))
    write_text(tmp_path, "a.txt")
    first = contents.digest([tmp_path / "a.txt"], print)
    monkeypatch.setattr(contents, "_content_digest", None)
    assert contents.digest([tmp_path / "a.txt"], print) == first
