"""Text, images and prepared data sets in a bucket give the batches of the same files on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mupax.disk import copy, path_of
from mupax.train.data import DataError
from mupax.zoo.configs import ConfigError, ModelConfig
from tests.fixtures.emulator import bucket, emulator
from tests.train.data.loading import (
    IMAGE_MODEL,
    TEXT_MODEL,
    assert_batches_equal,
    load,
    load_with_notes,
)
from tests.train.data.prepared import write_text_set
from tests.train.data.writing import write, write_pictures, write_texts

__all__ = ["bucket", "emulator"]  # fixtures

pytestmark = pytest.mark.usefixtures("work_folder")

TEXTS = [f"document {i} of some words\n" for i in range(60)]


def assert_same(remote: Any, local: Any) -> None:
    for batch, expected in zip(remote.eval_batches(), local.eval_batches(), strict=True):
        assert_batches_equal(batch, expected)
    for k in (0, 5):
        assert_batches_equal(remote.train_batch(k), local.train_batch(k))


def copied_notes(bucket: str, name: str, model: ModelConfig = TEXT_MODEL) -> list[str]:
    """Copy a folder to the bucket, and read it in both places. Return the notes on the bucket's."""
    kind, _, folder = name.partition(":")
    copy(Path(folder), path_of(f"{bucket}/{folder}"))
    remote, notes = load_with_notes(f"{kind}:{bucket}/{folder}", model)
    assert_same(remote, load(name, model))
    return notes


def test_text(bucket: str) -> None:
    for i in range(6):
        folder = "texts/deep" if i % 2 else "texts"
        write(f"{folder}/{i}.txt", "".join(f"line {j} of {i}\n" for j in range(40)))
    write("texts/records.jsonl", '{"message": "x"}\n')
    notes = copied_notes(bucket, "text:texts")
    assert any(f"{bucket}/texts" in note and "records.jsonl" in note for note in notes)
    assert_same(load(f"text:{bucket}/texts/0.txt"), load("text:texts/0.txt"))
    with pytest.raises(DataError, match=f"no file or folder {bucket}/nothing"):
        load(f"text:{bucket}/nothing")


def test_records(bucket: str) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        write_texts(f"records/{name}", TEXTS)
    copied_notes(bucket, "records:records")


def test_a_split_by_names(bucket: str) -> None:
    for name in ("train/a.jsonl", "valid/b.jsonl.gz", ".hidden/c.jsonl", "README.md"):
        write_texts(f"split/{name}", TEXTS)
    notes = copied_notes(bucket, "records:split")
    assert any("training on train" in note for note in notes)


def test_images(bucket: str) -> None:
    write_pictures("pictures", 3)
    copied_notes(bucket, "images:pictures", IMAGE_MODEL)


def test_a_prepared_data_set_is_fetched_once(tmp_path: Path, bucket: str) -> None:
    write_text_set(tmp_path / "tfds")
    copy(tmp_path / "tfds", path_of(f"{bucket}/tfds"))
    remote, notes = load_with_notes("tiny", data_dir=f"{bucket}/tfds")
    assert any(note.startswith(f"fetching {bucket}/tfds/tiny/1.2.3") for note in notes)
    assert_same(remote, load("tiny", data_dir="tfds"))
    assert load_with_notes("tiny", data_dir=f"{bucket}/tfds")[1] == []
    with pytest.raises(DataError, match=r"run `mupax data prepare mnist`, or set"):
        load("mnist", data_dir=f"{bucket}/tfds")


def test_generated_data_need_a_folder_of_this_machine(bucket: str) -> None:
    message = r"data\.data_dir is gs://.* is no folder of this machine"
    with pytest.raises(ConfigError, match=message):
        load("python_corpus", data_dir=f"{bucket}/tfds")
