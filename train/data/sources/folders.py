"""A user's own images, a folder per class, read in place: data.name `images:PATH`.

Either PATH/CLASS/*.png, split by the hash of the path within PATH as text is (at least one of each class on each side),
or PATH/train/CLASS/… and PATH/val/CLASS/… (also validation, eval or test), split as given.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from mupax.paths import path_of
from mupax.train.data import cache, crops, images
from mupax.train.data.interface import DataError
from mupax.train.data.records import corpus

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig
    from mupax.zoo.configs import ModelConfig

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_EVAL_FOLDERS = ("val", "validation", "eval", "test")
_MODES = {1: "L", 3: "RGB"}
_LISTED = 8
_Labelled = list[tuple[str, Path, int]]


class Files:
    """Image files with labels, decoded when they are asked for.

    Args:
        files: (name, path, label) each.
        channels: 1 for grey, 3 for colour.
    """

    def __init__(self, files: _Labelled, channels: int) -> None:
        self.files, self._channels = files, channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        _, path, label = self.files[i]
        return decoded(path, self._channels, str(path)), label


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO, name: str) -> Iterator[Image.Image]:
    """The image, of which the header is read; what PIL raises on it, here or in the block, is a DataError with its name."""
    try:
        with Image.open(file if isinstance(file, (Path, io.BytesIO)) else io.BytesIO(file.read_bytes())) as image:
            if image.mode in ("I", "F"):
                raise ValueError(f"its values have 32 bits and no range (mode {image.mode}); save it with 8 or 16 bits")
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {name}: {error}. Remove or repair it") from error


def decoded(file: Path | io.BytesIO, channels: int, name: str) -> np.ndarray:
    """The pixels of an image file, upright, uint8 [h, w, channels].

    Args:
        file: the file or its content.
        channels: 1 for grey, 3 for colour.
        name: what an error calls it.

    Raises:
        DataError: it is damaged, too large, of values without a range or no image that PIL knows.
    """
    with _opened(file, name) as image:
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):  # convert would clip at 255
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        pixels = np.asarray(image.convert(_MODES[channels]))
    return pixels.reshape(*pixels.shape[:2], channels)


def _broken(path: Path) -> DataError | None:
    """What is wrong with an image file; None where all of it can be decoded."""
    try:
        with _opened(path, str(path)) as image:
            image.draft("RGB", (64, 64))  # of a JPEG all is unpacked, and no more pixels computed than these
            image.load()
    except DataError as error:
        return error
    return None


def decoding_threads() -> int:
    """Threads that decode images: the cores, up to 16 (each holds a batch)."""
    return min(os.cpu_count() or 2, 16)


def own_images(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> images.ImageData:
    """A user's images as batches, cropped and scaled to the model's size.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is images:PATH.
    """
    path = path_of(config.name.removeprefix("images:"))
    if not path.is_dir():
        raise DataError(f"no folder {path}; write data.name as images:PATH, with a folder that has a folder per class")
    train, eval_, classes = split(path)
    vision = images.vision_model(config.name, model, classes)
    check_channels(config.name, vision.channels)
    config.pixels.check(vision.image_size, vision.channels)
    if broken := _scanned([*train, *eval_], note):
        if config.on_broken == "stop":
            first = next(iter(broken.values()))
            raise DataError(
                f"{first} ({len(broken)} of {len(train) + len(eval_)} are broken), or add --data.on-broken skip"
            )
        note(f"left out, as broken: {len(broken)} of {len(train) + len(eval_)} images: {_listed(sorted(broken))}")
        train, eval_ = ([item for item in files if str(item[1]) not in broken] for files in (train, eval_))
        if empty := sorted(set(range(len(classes))) - {label for _, _, label in train}):
            raise DataError(
                f"class {classes[empty[0]]} in {path} has no whole image to train on; repair some of its images"
            )
        if not eval_:
            raise DataError(f"{path} has no whole image to evaluate on; repair some")
    every = [(f"{side}/{name}", file) for side, files in (("train", train), ("eval", eval_)) for name, file, _ in files]
    # Names and sizes, not contents or times: the same for a copy of the folder, and quick for a large one.
    digest = cache.digest(*(f"{name}:{file.stat().st_size}" for name, file in every))
    return images.ImageData(
        config,
        Files(train, vision.channels),
        Files(eval_, vision.channels),
        views=(
            crops.training(config, vision.image_size),
            crops.fitted(config.pixels, vision.image_size),
        ),
        seed=seed,
        threads=decoding_threads(),
        class_names=classes,
        pixels=config.pixels,
        facts={"digest": digest, **({"broken_images": len(broken)} if broken else {})},
    )


def _scanned(files: _Labelled, note: cache.Note) -> dict[str, DataError]:
    """The images that cannot be decoded by path, and why: all are tried, once, for a file to refuse is better named now than in mid-run.

    What was whole stays known by its name, size and time. What was broken is looked at again, for it may be repaired.
    """
    stats = ((path, path.stat()) for _, path, _ in files)
    digest = cache.digest(*(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats))

    def broken(paths: list[Path]) -> dict[str, DataError]:
        with ThreadPool(decoding_threads()) as pool:
            errors = pool.imap(_broken, paths, chunksize=64)
            return {str(path): error for path, error in zip(paths, errors, strict=True) if error}

    def names() -> dict[str, float]:
        note(f"decoding {len(files)} images, to find broken ones")
        return dict.fromkeys(broken([path for _, path, _ in files]), 1.0)

    suspects = cache.remembered(f"decoded-{digest}", names)
    return broken([path for _, path, _ in files if str(path) in suspects]) if suspects else {}


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def check_channels(name: str, channels: int) -> None:
    """Refuse a number of channels that no decoded image has.

    Args:
        name: what an error calls the data.
        channels: that the model reads.

    Raises:
        DataError: neither 1 (grey) nor 3 (colour).
    """
    if channels not in _MODES:
        raise DataError(
            f"the model reads {channels} channels and {name} has pictures; write --model.channels 3, or 1 for grey"
        )


def split(path: Path) -> tuple[_Labelled, _Labelled, list[str]]:
    """Training files, evaluation files and class names (sorted).

    Raises:
        DataError: the folder has no images by class.
    """
    test = next((path / name for name in _EVAL_FOLDERS if (path / name).is_dir()), None)
    if test is not None and (path / "train").is_dir():
        classes = _classes(path / "train")
        if unknown := set(_classes(test)) - set(classes):
            raise DataError(f"{test} has class folders that {path / 'train'} has not: {', '.join(sorted(unknown)[:5])}")
        train, eval_ = (list(itertools.chain(*_files(side, classes))) for side in (path / "train", test))
        return train, eval_, classes
    classes = _classes(path)
    train, eval_ = [], []
    for name, files in zip(classes, _files(path, classes), strict=True):
        if len(files) < 2:
            raise DataError(f"class folder {path / name} has one image; give it at least two, to train and to test")
        ranked = sorted(files, key=lambda item: corpus.rank(item[0]))
        # Ranks below the share are the hash split; one of each class at least on either side.
        count = sum(corpus.side(item[0]) == "eval" for item in files)
        count = min(max(count, 1), len(files) - 1)
        eval_ += ranked[:count]
        train += ranked[count:]
    if len(classes) == 1:
        raise DataError(
            f"{path} has one class folder, {classes[0]}, and nothing to tell it from; put the other classes beside it"
        )
    return sorted(train), sorted(eval_), classes


def _classes(path: Path) -> list[str]:
    classes = sorted(sub.name for sub in path.iterdir() if sub.is_dir() and not sub.name.startswith("."))
    if not classes:
        raise DataError(
            f"{path} has no folders in it; images:PATH takes a folder that has a folder of images per class"
        )
    return classes


def _files(path: Path, classes: list[str]) -> list[_Labelled]:
    """Every image of each of these classes below `path`, sorted."""
    labelled = []
    for label, name in enumerate(classes):
        files = sorted(f for f in (path / name).rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
        if not files:
            raise DataError(
                f"class folder {path / name} has no image ({', '.join(SUFFIXES)}); put images there or remove it"
            )
        labelled.append([(f.relative_to(path).as_posix(), f, label) for f in files])
    return labelled
