"""Prepared data are known by content: neither size and time nor a touch tells a change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mupax.train.data.interface import DataError
from mupax.train.data.records import contents
from tests.train.data.loading import IMAGE_MODEL, load, load_with_notes, token_ids
from tests.train.data.writing import write, write_pictures, write_texts

pytestmark = pytest.mark.usefixtures("work_folder")

TEXTS = [f"number {i}\n" for i in range(60)]
ALWAYS = -(10**12)
"""A tick of clocks after which every file is old enough to be remembered by its times."""


def text_lines(name: str) -> list[str]:
    """Return the lines of both sides. Records are on the side that their text tells."""
    source = load(name)
    return sorted("".join(map(source.tokenizer.decode, token_ids(source))).splitlines())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("name", "tick"), [("text:d/a.txt", ALWAYS), ("records:d/a.jsonl", 10**12)]
)  # with a record of times and without
def test_changed_data_of_the_same_size_and_time_are_read_anew(
    name: str, tick: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_TICK_NS", tick)
    file = Path(name.partition(":")[2])
    write("d/a.txt", "".join(TEXTS))
    write_texts("d/a.jsonl", TEXTS)
    before = text_lines(name)
    stat = file.stat()
    changed = file if in_place else Path("other")
    changed.write_bytes(file.read_bytes().replace(b"number", b"letter"))
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed.replace(file)
    assert file.stat().st_size == stat.st_size
    assert text_lines(name) == [line.replace("number", "letter") for line in before]


def test_control_a_touch_or_a_copy_prepares_nothing_anew(
    packed: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_TICK_NS", ALWAYS)
    file = write("a.txt", "".join(TEXTS))
    load("text:a.txt")
    before = packed()
    os.utime(file)
    load("text:a.txt")
    file.unlink()
    write(file, "".join(TEXTS))
    _, notes = load_with_notes("text:a.txt")
    assert packed() == before
    assert not any("packing" in note for note in notes)


def test_an_unchanged_file_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_TICK_NS", ALWAYS)
    file = write("a.txt", "".join(TEXTS))
    first = contents.digest([file], print)
    monkeypatch.setattr(contents, "_content_digest", None)
    assert contents.digest([file], print) == first


def test_a_file_that_vanishes_after_it_was_listed_is_named(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt", "".join(TEXTS))
    write_pictures("p")
    real_digest = contents.digest

    def after_a_deletion(files: list[Path], *args: Any) -> str:
        files[0].unlink()
        return real_digest(files, *args)

    monkeypatch.setattr(contents, "digest", after_a_deletion)
    message = r"cannot read .*{}: No such file or directory; .* when nothing moves or deletes"
    with pytest.raises(DataError, match=message.format(r"a\.txt")):
        load("text:a.txt")
    with pytest.raises(DataError, match=message.format(r"\.png")):
        load("images:p", IMAGE_MODEL)
