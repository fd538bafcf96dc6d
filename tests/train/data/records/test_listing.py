"""Files below a folder: hidden ones are left out, and links are followed once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mupax.train.data.records.listing import files_below, summary
from tests.train.data.writing import write_files

pytestmark = pytest.mark.core


def link(place: Path, **targets: Path) -> None:
    """Write links in a folder."""
    for name, target in targets.items():
        (place / name).symlink_to(target)


def test_files_below_a_folder(tmp_path: Path) -> None:
    names = (
        "a.txt deep/b.txt .secret deep/.ipynb_checkpoints/b.txt __MACOSX/a.txt deep/__MACOSX/a.txt"
    )
    root = write_files(tmp_path / ".hidden/data", dict.fromkeys(names.split(), "x"))
    outside = write_files(tmp_path / "outside", {"c.txt": "x"})
    link(outside, back=root)
    link(
        root,
        linked=outside,
        again=root / "deep",
        loop=root,
        above=tmp_path,
        nowhere=tmp_path / "no",
    )
    os.mkfifo(root / "pipe")
    listed = files_below(root)
    assert [name for name, _ in listed.files] == ["a.txt", "deep/b.txt", "linked/c.txt"]
    assert sorted(listed.skipped) == ["above", "again", "linked/back", "loop", "nowhere", "pipe"]
    assert len(summary(listed.skipped)) == len(set(listed.skipped.values()))


def test_links_that_overlap_are_read_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"outside/deep/a.txt": "x", "data/.store/deep/b.txt": "x"})
    data = tmp_path / "data"
    outside = tmp_path / "outside"
    link(data, d1=outside / "deep", d2=outside, d3=outside, d4=data / ".store/deep")
    listed = files_below(data)
    assert [name for name, _ in listed.files] == ["d1/a.txt", "d4/b.txt"]
    assert sorted(listed.skipped) == ["d2/deep", "d3"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    assert "locked" in files_below(tmp_path).skipped
