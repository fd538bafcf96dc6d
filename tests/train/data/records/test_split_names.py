"""Names of splits, and the files below a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mupax.train.data.interface import DataError
from mupax.train.data.records import listing, split_names

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("Train", "train"),
        ("TRN", "train"),
        ("training_set", "train"),
        ("wiki.train.tokens", "train"),
        ("train-00000-of-00002.parquet", "train"),
        ("valid", "validation"),
        ("val.txt", "validation"),
        ("my-dev.jsonl", "validation"),
        ("eval", "validation"),
        ("test_set", "test"),
        ("holdout.bin", "test"),
        ("trains", None),
        ("evaluate.py", None),
        ("contest.txt", None),
        ("train_test.txt", None),
        ("bus", None),
    ],
)
def test_a_whole_word_names_the_split(name: str, split: str | None):
    assert split_names.split_of(name) == split


def test_validation_comes_before_test():
    parts = split_names.by_name(["train", "valid", "Test"], "data")
    assert parts is not None
    assert parts == (["train"], ["valid"], ["Test"])
    assert "Test" in parts.describe()


def test_test_evaluates_where_there_is_no_validation():
    assert split_names.by_name(["train.txt", "test.txt"], "data") == (
        ["train.txt"],
        ["test.txt"],
        [],
    )


@pytest.mark.parametrize(
    "names",
    [
        ["bus", "car", "train"],
        ["train.py", "test_x.py", "model.py"],
        ["train"],
        ["val", "test"],
        [],
    ],
)
def test_control_names_that_are_no_split(names: list[str]):
    assert split_names.by_name(names, "data") is None


@pytest.mark.parametrize(
    "names", [["train", "val", "dev"], ["train", "training", "val"], ["train", "test", "holdout"]]
)
def test_two_parts_of_one_split_are_refused(names: list[str]):
    with pytest.raises(DataError, match=f"{names[-2]}|{names[-1]}"):
        split_names.by_name(names, "data")


def test_many_files_of_one_word_are_one_part():
    files = ["train-0.parquet", "train-1.parquet", "validation-0.parquet"]
    assert split_names.by_name(files, "data") == (files[:2], files[2:], [])


def test_files_below_a_folder(tmp_path: Path):
    root, outside = tmp_path / ".hidden" / "data", tmp_path / "outside"
    for name in (
        "a.txt",
        "deep/b.txt",
        ".secret",
        "deep/.ipynb_checkpoints/b.txt",
        "__MACOSX/a.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    outside.mkdir()
    (outside / "c.txt").write_text("x")
    (outside / "back").symlink_to(root)
    (root / "linked").symlink_to(outside)
    (root / "again").symlink_to(root / "deep")
    (root / "loop").symlink_to(root)
    (root / "above").symlink_to(tmp_path)
    (root / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(root / "pipe")
    listed = listing.files_below(root)
    assert [name for name, _ in listed.files] == ["a.txt", "deep/b.txt", "linked/c.txt"]
    assert sorted(listed.skipped) == ["above", "again", "linked/back", "loop", "nowhere", "pipe"]
    assert len(listing.summary(listed.skipped)) == len(set(listed.skipped.values()))


def test_links_that_overlap_are_read_once(tmp_path: Path):
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "deep" / "a.txt").write_text("x")
    (tmp_path / "data").mkdir()
    for name, target in (
        ("1", "outside/deep"),
        ("2", "outside"),
        ("3", "outside"),
        ("4", "data/.store/deep"),
    ):
        (tmp_path / "data" / name).symlink_to(tmp_path / target)
    (tmp_path / "data" / ".store" / "deep").mkdir(parents=True)
    (tmp_path / "data" / ".store" / "deep" / "b.txt").write_text("x")
    listed = listing.files_below(tmp_path / "data")
    assert [name for name, _ in listed.files] == ["1/a.txt", "4/b.txt"]
    assert sorted(listed.skipped) == ["2/deep", "3"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "locked").mkdir(mode=0)
    assert "locked" in listing.files_below(tmp_path).skipped
