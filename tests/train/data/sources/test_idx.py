"""IDX files: read as they are described, packed or not, and a clear word where they are missing, damaged or do not fit."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.recipes.laptop import vit_fashion
from mupax.train.config.run import DataConfig
from mupax.train.data.sources import idx

pytestmark = pytest.mark.core


def written(folder: Path, name: str, values: np.ndarray, packed: bool = False) -> None:
    """An IDX file, byte by byte."""
    head = (
        b"\x00\x00\x08"
        + bytes([values.ndim])
        + b"".join(size.to_bytes(4, "big") for size in values.shape)
    )
    content = head + values.astype(np.uint8).tobytes()
    (folder / (f"{name}.gz" if packed else name)).write_bytes(
        gzip.compress(content) if packed else content
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images to train on, of classes 0 to 9, and five to test; two files of four are packed."""
    random = np.random.default_rng(0)
    for name, shape in zip(idx.FILES, [(10, 28, 28), (10,), (5, 28, 28), (5,)], strict=True):
        values = np.arange(shape[0]) if len(shape) == 1 else random.integers(0, 256, shape)
        written(tmp_path, name, values, packed=name.startswith("t10k"))
    return tmp_path


def load(folder: Path, name: str = "idx:{}", model=None, **fields) -> data.Data:
    config = DataConfig(name=name.format(folder), batch_size=5, augment=False, **fields)
    return data.load(config, model or vit_fashion().model, seed=0, note=lambda line: None)


def test_images_and_labels_are_the_files_each_once_an_epoch(folder: Path) -> None:
    dataset = load(folder)
    assert (dataset.train_size, dataset.eval_size, dataset.class_names) == (
        10,
        5,
        [str(n) for n in range(10)],
    )
    images = np.random.default_rng(0).integers(0, 256, (10, 28, 28))
    batches = [dataset.train_batch(k) for k in range(2)]
    labels = np.concatenate([batch["targets"] for batch in batches])
    assert sorted(labels) == list(range(10))
    pixels = np.concatenate([batch["inputs"] for batch in batches])[..., 0]
    np.testing.assert_allclose(pixels, images[labels] / 127.5 - 1, atol=1e-6)


def test_fashion_is_in_a_folder_and_names_the_clothes(folder: Path) -> None:
    dataset = load(folder, "fashion", data_dir=str(folder))
    assert dataset.class_names == list(idx.FASHION)
    np.testing.assert_array_equal(
        dataset.train_batch(0)["inputs"], load(folder).train_batch(0)["inputs"]
    )


def test_what_is_missing_is_named_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"train vit-fashion --data.data-dir {tmp_path}".split()) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert (
        f"Fashion-MNIST is not in {tmp_path}; `apt-get install dataset-fashion-mnist` puts it"
        in err
    )
    with pytest.raises(
        data.DataError, match=r"no file .*train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", "is no IDX file: it begins with nothing"),
        ("train-images-idx3-ubyte", b"\x89PNG\r\n", "is no IDX file: it begins with 89504e47"),
        ("train-labels-idx1-ubyte", b"\0\0\x0d\x01\0\0\0\x0a" + bytes(40), "values of IDX type 0xd; only uint8"),
        ("train-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x0a" + bytes(9), "is not whole: .* 18 bytes, and it has 17"),
        ("train-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x09" + bytes(9), "the files do not belong together"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(b"\0\0\x08\x01")[:-6], "cannot be read: .*; get it again"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x05" + b"\x63" * 5, "100 classes and the model 10"),
        ("t10k-images-idx3-ubyte", b"\0\0\x08\x03\0\0\0\x05\0\0\0\x02\0\0\0\x01" + bytes(10), "only squares of one size"),
    ],
)  # fmt: skip
def test_damaged_files_are_errors_that_name_them(
    name: str, content: bytes, message: str, folder: Path
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        load(folder)
