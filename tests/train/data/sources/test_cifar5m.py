"""CIFAR-5M from tiny stand-ins of its npz parts."""

from __future__ import annotations

import dataclasses
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train import data
from mupax.train.data.sources import cifar5m
from mupax.zoo import configs
from mupax.zoo.configs import ViTConfig
from tests.train.data.sources.test_published import cache_folder, load

CIFAR = configs.get("bordelon-vit")
assert isinstance(CIFAR, ViTConfig)
__all__ = ["cache_folder"]  # a fixture


def parts(
    folder: Path, sizes: tuple[int, ...] = (5, 3, 1, 4, 2, 7)
) -> tuple[np.ndarray, np.ndarray]:
    """Writes six tiny parts; returns all images and labels in order."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (sum(sizes), 32, 32, 3), dtype=np.uint8)
    y = rng.integers(0, 10, sum(sizes))
    for i, (a, b) in enumerate(zip(np.cumsum([0, *sizes]), np.cumsum(sizes), strict=False)):
        (np.savez_compressed if i % 2 else np.savez)(folder / f"part{i}.npz", X=x[a:b], Y=y[a:b])
    return x, y


def raw(source: data.Data, batches: list[dict]) -> np.ndarray:
    images = np.concatenate([b["inputs"][b["weights"] > 0] for b in batches])
    return np.round((images + 1) * 127.5).astype(np.uint8)


def test_cifar5m_trains_on_five_parts_and_tests_on_the_last(tmp_path: Path) -> None:
    x, y = parts(tmp_path)
    dataset = load("cifar5m", tmp_path, CIFAR, augment=False, batch_size=5)
    assert (dataset.train_size, dataset.eval_size) == (15, 7)
    train, test = [dataset.train_batch(k) for k in range(3)], list(dataset.eval_batches())
    for batches, first, last in ((train, 0, 15), (test, 15, 22)):
        images_seen = raw(dataset, batches)
        labels = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
        examples = sorted(
            (image.tobytes(), int(label)) for image, label in zip(images_seen, labels, strict=True)
        )
        assert examples == sorted((x[i].tobytes(), int(y[i])) for i in range(first, last))
    assert dataset.class_names is not None
    assert dataset.class_names[0] == "airplane"
    assert "tensorflow" not in sys.modules


def test_cifar5m_is_augmented_unless_told_otherwise(tmp_path: Path) -> None:
    parts(tmp_path)
    plain, varied = (
        load("cifar5m", tmp_path, CIFAR, augment=flag).train_batch(0) for flag in (False, True)
    )
    assert np.array_equal(plain["targets"], varied["targets"])
    assert not np.array_equal(plain["inputs"], varied["inputs"])


def test_cifar5m_goes_on_with_the_part_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts(tmp_path)
    read: list[str] = []
    examples = cifar5m.examples

    def dying(path: Path):
        read.append(path.stem)
        for i, example in enumerate(examples(path)):
            if path.stem == "part3" and i == 2 and read.count("part3") == 1:
                raise KeyboardInterrupt
            yield example

    monkeypatch.setattr(cifar5m, "examples", dying)
    with pytest.raises(KeyboardInterrupt):
        load("cifar5m", tmp_path, CIFAR)
    for i in range(3):
        (tmp_path / f"part{i}.npz").unlink()  # what is prepared is not needed again
    dataset = load("cifar5m", tmp_path, CIFAR)
    assert read == ["part0", "part1", "part2", "part3", "part3", "part4", "part5"]
    assert (dataset.train_size, dataset.eval_size) == (15, 7)
    notes: list[str] = []
    assert load("cifar5m", tmp_path, CIFAR, notes).facts == dataset.facts
    assert notes == []


def test_cifar5m_says_which_parts_are_missing(tmp_path: Path) -> None:
    parts(tmp_path)
    (tmp_path / "part1.npz").unlink()
    (tmp_path / "part4.npz").unlink()
    with pytest.raises(
        data.DataError, match=rf"needs part1\.npz, part4\.npz in {tmp_path}; get them from https://"
    ):
        load("cifar5m", tmp_path, CIFAR)
    assert not (tmp_path / "cifar5m").exists()  # said before anything is prepared


def test_cifar5m_names_itself_where_a_part_is_damaged(tmp_path: Path) -> None:
    parts(tmp_path)
    load("cifar5m", tmp_path, CIFAR)
    next(tmp_path.glob("cifar5m/part2/*/*array_record*")).unlink()
    with pytest.raises(
        data.DataError, match=r"part2/1\.0\.0 is damaged: .*mupax data prepare cifar5m\)"
    ):
        load("cifar5m", tmp_path, CIFAR)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4000])


def _other_arrays(path: Path) -> None:
    np.savez(path, images=np.zeros((2, 32, 32, 3), np.uint8), Y=np.zeros(2, int))


def _other_shape(path: Path) -> None:
    np.savez(path, X=np.zeros((2, 3, 32, 32), np.uint8), Y=np.zeros(2, int))


def _other_dtype(path: Path) -> None:
    np.savez(path, X=np.zeros((2, 32, 32, 3), np.float32), Y=np.zeros(2, int))


def _other_labels(path: Path) -> None:
    np.savez(path, X=np.zeros((2, 32, 32, 3), np.uint8), Y=np.array([3, 10]))


def _pickled(path: Path) -> None:
    np.savez(path, X=np.zeros((2, 32, 32, 3), np.uint8), Y=np.array([{}, {}], object))


def _no_npy(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("X.npy", b"nothing")
        archive.writestr("Y.npy", b"nothing")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "is not a whole npz file"),
        (_other_arrays, "is not a whole npz file"),
        (_other_shape, r"has X \(2, 3, 32, 32\)"),
        (_other_dtype, "has an array X of float32"),
        (_other_labels, "has labels outside 0 to 9"),
        (_pickled, "has an array Y of object"),
        (_no_npy, "has no array X"),
    ],
)
def test_damaged_parts_are_named(tmp_path: Path, damage, message: str) -> None:
    parts(tmp_path)
    damage(tmp_path / "part0.npz")
    with pytest.raises(
        data.DataError, match=rf"part0\.npz {message}.*get it again from https://.*/part0\.npz"
    ):
        list(cifar5m.examples(tmp_path / "part0.npz"))


def test_parts_are_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = parts(tmp_path)
    monkeypatch.setattr(cifar5m, "_IMAGES_AT_ONCE", 2)
    largest = 0
    read = cifar5m._read

    def watched(*arguments):
        nonlocal largest
        block = read(*arguments)
        largest = max(largest, block.nbytes)
        return block

    monkeypatch.setattr(cifar5m, "_read", watched)
    images = np.stack([image for image, _ in cifar5m.examples(tmp_path / "part0.npz")])
    assert np.array_equal(images, x[:5])
    assert largest == 2 * 32 * 32 * 3


def test_cifar5m_needs_its_size(tmp_path: Path) -> None:
    parts(tmp_path)
    with pytest.raises(data.DataError, match=r"write --model\.image-size 32 --model\.channels 3"):
        load("cifar5m", tmp_path, dataclasses.replace(CIFAR, image_size=16))


def test_command_on_cifar5m(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", "cifar5m", "--data-dir", str(tmp_path)]) == 2
    assert "cifar5m needs part0.npz" in capsys.readouterr().err
    parts(tmp_path)
    assert main(["data", "prepare", "cifar5m", "--data-dir", str(tmp_path)]) == 0
