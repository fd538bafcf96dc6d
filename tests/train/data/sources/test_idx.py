"""IDX files, packed or not, and messages where they are missing, damaged or do not fit."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.config.recipes import vit_fashion
from mupax.train.data.sources import idx
from tests.fixtures.commands import refusal
from tests.train.data import loading
from tests.train.data.writing import write

pytestmark = pytest.mark.core

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 28, 28), np.uint8)
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = idx.FILES


def idx_bytes(values: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return b"\x00\x00\x08" + bytes([values.ndim]) + sizes + values.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images to train on, of classes 0 to 9, and five to test; two files of four are packed."""
    write(tmp_path / TRAIN_IMAGES, idx_bytes(IMAGES))
    write(tmp_path / TRAIN_LABELS, idx_bytes(np.arange(10)))
    write(tmp_path / f"{TEST_IMAGES}.gz", gzip.compress(idx_bytes(IMAGES[:5])))
    write(tmp_path / f"{TEST_LABELS}.gz", gzip.compress(idx_bytes(np.arange(5))))
    return tmp_path


def load(folder: Path, name: str = "idx:{}", **fields: Any) -> Any:
    name = name.format(folder)
    return loading.load(name, vit_fashion().model, batch_size=5, augment=False, **fields)


def test_images_and_labels_are_the_files_each_once_an_epoch(folder: Path) -> None:
    dataset = load(folder)
    assert (dataset.train_size, dataset.eval_size) == (10, 5)
    assert dataset.class_names == [str(n) for n in range(10)]
    epoch = loading.joined([dataset.train_batch(k) for k in range(2)])
    labels = epoch["targets"]
    assert sorted(labels) == list(range(10))
    expected = IMAGES[labels, ..., None] / 127.5 - 1
    np.testing.assert_allclose(epoch["inputs"], expected, atol=1e-6)


def test_fashion_is_in_a_folder_and_names_the_clothes(folder: Path) -> None:
    dataset = load(folder, "fashion", data_dir=str(folder))
    assert dataset.class_names == list(idx.FASHION)
    loading.assert_batches_equal(dataset.train_batch(0), load(folder).train_batch(0))


def test_missing_files_are_named_with_the_command_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal("train vit-fashion --data.data-dir .")
    assert "Fashion-MNIST is not in ." in message
    assert "; `apt-get install dataset-fashion-mnist` puts it" in message
    message = r"no file .*train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"
    loading.assert_refused(message, "idx:.", vit_fashion().model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_IMAGES, b"", "is no IDX file: it begins with nothing"),
        (TRAIN_IMAGES, b"\x89PNG\r\n", "is no IDX file: it begins with 89504e47"),
        (TRAIN_LABELS, b"\0\0\x0d\x01\0\0\0\x0a" + bytes(40), "values of IDX type 0xd; only uint8"),
        (TRAIN_LABELS, b"\0\0\x08\x01\0\0\0\x0a" + bytes(9), "is not whole: .* 18 bytes, and it has 17"),
        (TRAIN_LABELS, b"\0\0\x08\x01\0\0\0\x09" + bytes(9), r"train-labels-idx1-ubyte \(9,\), not .*; give images and labels of one data set"),
        (f"{TEST_LABELS}.gz", gzip.compress(b"\0\0\x08\x01")[:-6], "cannot be read: .*; get it again"),
        (TEST_LABELS, b"\0\0\x08\x01\0\0\0\x05" + b"\x63" * 5, "100 classes and the model 10"),
        (TEST_IMAGES, b"\0\0\x08\x03\0\0\0\x05\0\0\0\x02\0\0\0\x01" + bytes(10), "only squares of one size"),
    ],
)  # fmt: skip
def test_damaged_files_are_errors_that_name_them(
    name: str, content: bytes, message: str, folder: Path
) -> None:
    write(folder / name, content)
    loading.assert_refused(message, f"idx:{folder}", vit_fashion().model)
