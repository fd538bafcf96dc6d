"""Text, images and prepared data sets in a bucket give the batches that the same files on a disk do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mupax.disk import copy, path_of
from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.zoo.configs import ConfigError, ModelConfig
from tests.fixtures.emulator import bucket, emulator
from tests.train.data.sources.test_folders import pictures
from tests.train.data.sources.test_published import (
    SHORT,
    TEXT,
    VIT,
    cache_folder,
    prepare,
    sentences,
)
from tests.train.data.sources.test_records import write_as

__all__ = ["bucket", "cache_folder", "emulator"]  # fixtures


def same(one: data.Data, other: data.Data) -> bool:
    batches = (
        [*source.eval_batches(), source.train_batch(0), source.train_batch(5)]
        for source in (one, other)
    )
    return all(
        np.array_equal(a[name], b[name]) for a, b in zip(*batches, strict=True) for name in a
    )


def load(
    model: ModelConfig, name: str, notes: list[str] | None = None, **fields: object
) -> data.Data:
    config = DataConfig(name=name, batch_size=6, **fields)
    return data.load(config, model, seed=0, note=(notes if notes is not None else []).append)


def test_text(tmp_path: Path, bucket: str) -> None:
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    for i in range(6):
        (texts / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(
            "".join(f"line {j} of {i}\n" for j in range(40))
        )
    (texts / "records.jsonl").write_text('{"message": "x"}\n')
    copy(texts, path_of(f"{bucket}/texts"))
    notes: list[str] = []
    assert same(load(SHORT, f"text:{bucket}/texts", notes), load(SHORT, f"text:{texts}"))
    assert any(f"{bucket}/texts" in note and "records.jsonl" in note for note in notes)
    assert same(load(SHORT, f"text:{bucket}/texts/0.txt"), load(SHORT, f"text:{texts / '0.txt'}"))
    with pytest.raises(data.DataError, match=f"no file or folder {bucket}/nothing"):
        load(SHORT, f"text:{bucket}/nothing")


def test_records(tmp_path: Path, bucket: str) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        write_as(tmp_path / "records" / name)
    copy(tmp_path / "records", path_of(f"{bucket}/records"))
    assert same(
        load(SHORT, f"records:{bucket}/records"), load(SHORT, f"records:{tmp_path / 'records'}")
    )


def test_a_split_by_names(tmp_path: Path, bucket: str) -> None:
    for name in ("train/a.jsonl", "valid/b.jsonl.gz", ".hidden/c.jsonl", "README.md"):
        write_as(tmp_path / "split" / name)
    copy(tmp_path / "split", path_of(f"{bucket}/split"))
    notes: list[str] = []
    assert same(
        load(SHORT, f"records:{bucket}/split", notes), load(SHORT, f"records:{tmp_path / 'split'}")
    )
    assert any("training on train" in note for note in notes)


def test_images(tmp_path: Path, bucket: str) -> None:
    copy(pictures(tmp_path / "pictures", 3), path_of(f"{bucket}/pictures"))
    assert same(
        load(VIT, f"images:{bucket}/pictures"), load(VIT, f"images:{tmp_path / 'pictures'}")
    )


def test_a_prepared_data_set_is_fetched_once(tmp_path: Path, bucket: str) -> None:
    prepare(tmp_path / "tfds", TEXT, {"train": sentences(0, 20), "validation": sentences(20, 25)})
    copy(tmp_path / "tfds", path_of(f"{bucket}/tfds"))
    notes: list[str] = []
    there = load(SHORT, "tiny", notes, data_dir=f"{bucket}/tfds")
    assert any(note.startswith(f"fetching {bucket}/tfds/tiny/1.2.3") for note in notes)
    assert same(there, load(SHORT, "tiny", data_dir=str(tmp_path / "tfds")))
    notes.clear()
    load(SHORT, "tiny", notes, data_dir=f"{bucket}/tfds")
    assert notes == []
    with pytest.raises(data.DataError, match=r"run `mupax data prepare mnist`, or set"):
        load(SHORT, "mnist", data_dir=f"{bucket}/tfds")


def test_what_is_made_here_is_made_on_a_disk(bucket: str) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.data_dir is gs://.* is no folder of this machine"
    ):
        load(SHORT, "python_corpus", data_dir=f"{bucket}/tfds")
