"""CIFAR-5M from tiny stand-ins of its npz parts."""

from __future__ import annotations

import dataclasses
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.data import DataError
from mupax.train.data.records import bounds
from mupax.train.data.sources import cifar5m
from mupax.zoo import configs
from mupax.zoo.configs import ViTConfig
from tests.fixtures.commands import output_line, refusal
from tests.train.data import loading

CIFAR = configs.get("bordelon-vit")
assert isinstance(CIFAR, ViTConfig)

pytestmark = pytest.mark.usefixtures("work_folder")

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (22, 32, 32, 3), dtype=np.uint8)
LABELS = rng.integers(0, 10, 22)


@pytest.fixture
def parts(work_folder: Path) -> Path:
    """Six tiny parts."""
    ends = np.cumsum([5, 3, 1, 4, 2, 7])
    pairs = zip(np.split(IMAGES, ends[:-1]), np.split(LABELS, ends[:-1]), strict=True)
    for i, (images, labels) in enumerate(pairs):
        save = np.savez_compressed if i % 2 else np.savez
        save(work_folder / f"part{i}.npz", X=images, Y=labels)
    return work_folder


def load(model: Any = CIFAR, **fields: Any) -> Any:
    return loading.load("cifar5m", model, **{"data_dir": ".", "batch_size": 6, **fields})


@pytest.mark.usefixtures("parts")
def test_cifar5m_trains_on_five_parts_and_tests_on_the_last() -> None:
    dataset = load(augment=False, batch_size=5)
    assert (dataset.train_size, dataset.eval_size) == (15, 7)
    train = [dataset.train_batch(k) for k in range(3)]
    for batches, places in ((train, slice(0, 15)), (dataset.eval_batches(), slice(15, 22))):
        batch = loading.joined([*batches])
        pixels = np.round((batch["inputs"] + 1) * 127.5).astype(np.uint8)
        examples = zip(pixels, batch["targets"], batch["weights"], strict=True)
        expected = zip(IMAGES[places], LABELS[places], strict=True)
        assert sorted((image.tobytes(), label) for image, label, weight in examples if weight) == (
            sorted((image.tobytes(), label) for image, label in expected)
        )
    assert dataset.class_names[0] == "airplane"
    assert "tensorflow" not in sys.modules


@pytest.mark.usefixtures("parts")
def test_cifar5m_is_augmented_by_default() -> None:
    plain = load(augment=False).train_batch(0)
    varied = load().train_batch(0)
    assert np.array_equal(plain["targets"], varied["targets"])
    assert not np.array_equal(plain["inputs"], varied["inputs"])


def test_cifar5m_goes_on_with_the_part_it_was_at(
    parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    examples = cifar5m.examples

    def dying(path: Path) -> Iterator[Any]:
        read.append(path.stem)
        for i, example in enumerate(examples(path)):
            if path.stem == "part3" and i == 2 and read.count("part3") == 1:
                raise KeyboardInterrupt
            yield example

    monkeypatch.setattr(cifar5m, "examples", dying)
    with pytest.raises(KeyboardInterrupt):
        load()
    for i in range(3):
        (parts / f"part{i}.npz").unlink()  # parts that are prepared are not needed again
    dataset = load()
    assert read == ["part0", "part1", "part2", "part3", "part3", "part4", "part5"]
    assert (dataset.train_size, dataset.eval_size) == (15, 7)
    again, notes = loading.load_with_notes("cifar5m", CIFAR, data_dir=".")
    assert again.facts == dataset.facts
    assert notes == []


def test_cifar5m_names_missing_parts(parts: Path) -> None:
    (parts / "part1.npz").unlink()
    (parts / "part4.npz").unlink()
    with pytest.raises(
        DataError, match=r"needs part1\.npz, part4\.npz in \.; get them from https://"
    ):
        load()
    assert not Path("cifar5m").exists()  # refused before anything is prepared


@pytest.mark.usefixtures("parts")
def test_cifar5m_names_itself_where_a_part_is_damaged() -> None:
    load()
    next(Path().glob("cifar5m/part2/*/*array_record*")).unlink()
    message = r"part2/1\.0\.0 is damaged: .*mupax data prepare cifar5m\)"
    with pytest.raises(DataError, match=message):
        load()


X = np.zeros((2, 32, 32, 3), np.uint8)
Y = np.zeros(2, int)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": X, "Y": Y}, "is not a whole npz file"),
        ({"X": X.reshape(2, 3, 32, 32), "Y": Y}, r"has X \(2, 3, 32, 32\)"),
        ({"X": X, "Y": Y[:1]}, r"has X \(2, 32, 32, 3\) and Y \(1,\)"),
        ({"X": X.astype(np.float32), "Y": Y}, "has an array X of float32"),
        ({"X": X.astype(int), "Y": Y}, "has an array X of int64"),
        ({"X": np.asfortranarray(X), "Y": Y}, "has an array X of uint8, not .* in C order"),
        ({"X": X, "Y": np.array([3, 10])}, "has labels outside 0 to 9"),
        ({"X": X, "Y": np.array([-1, 3])}, "has labels outside 0 to 9"),
        ({"X": X, "Y": np.array([{}, {}], object)}, "has an array Y of object"),
        ("cut", "is not a whole npz file"),
        ("no npy", "has no array X"),
        ("short", "ends too early"),
        ("bomb", r"has an array X\.npy that unpacks from [\d,]+ bytes to [\d,]+, more than"),
    ],
)
def test_damaged_parts_are_named(parts: Path, arrays: Any, message: str) -> None:
    path = parts / "part0.npz"
    if arrays == "cut":
        path.write_bytes(path.read_bytes()[:-4000])
    elif arrays == "no npy":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("X.npy", b"nothing")
            archive.writestr("Y.npy", b"nothing")
    elif arrays == "short":
        with zipfile.ZipFile(path, "w") as archive:
            for name, values in {"X": X, "Y": Y}.items():
                stored = io.BytesIO()
                np.save(stored, values)
                archive.writestr(f"{name}.npy", stored.getvalue()[:-1])
    elif arrays == "bomb":
        np.savez_compressed(path, X=np.zeros(bounds.WINDOW_BYTES, np.uint8), Y=Y)
    else:
        np.savez(path, **arrays)
    message = rf"part0\.npz {message}.*get it again from https://.*/part0\.npz"
    with pytest.raises(DataError, match=message):
        list(cifar5m.examples(path))


def test_parts_are_read_in_bounded_memory(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar5m, "_IMAGES_AT_ONCE", 2)
    sizes = []
    read = cifar5m._read

    def watched(*args: Any) -> np.ndarray:
        block = read(*args)
        sizes.append(block.nbytes)
        return block

    monkeypatch.setattr(cifar5m, "_read", watched)
    images = np.stack([image for image, _ in cifar5m.examples(parts / "part0.npz")])
    assert np.array_equal(images, IMAGES[:5])
    assert max(sizes) == 2 * 32 * 32 * 3


@pytest.mark.usefixtures("parts")
def test_cifar5m_needs_its_size() -> None:
    with pytest.raises(DataError, match=r"write --model\.image-size 32 --model\.channels 3"):
        load(dataclasses.replace(CIFAR, image_size=16))


def test_command_on_cifar5m(request: pytest.FixtureRequest) -> None:
    words = "data prepare cifar5m --data-dir ."
    assert "cifar5m needs part0.npz" in refusal(words)
    request.getfixturevalue("parts")
    output_line(words)
