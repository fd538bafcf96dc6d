"""Loader of CIFAR-5M (Nakkiran et al. 2021) from its own npz files, read a few images at a time.

An npz is a zip of arrays, here of 3 GB each, and `numpy.load` would hold a complete array in
memory. This file reads the arrays as streams instead. Names, shapes, dtypes and lengths of the
arrays are checked, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import tensorflow_datasets as tfds

from mupax.train.config.data import DEFAULT_LIMITS
from mupax.train.data import cache, images
from mupax.train.data.interface import DataError, is_system_error, unreadable
from mupax.train.data.records import builders
from mupax.train.data.records.bounds import WINDOW_BYTES
from mupax.train.data.records.ids import array_header
from mupax.train.data.sources import published
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

SOURCE = "https://storage.googleapis.com/gresearch/cifar5m/"
PARTS = [f"part{i}" for i in range(6)]
"""Names of the npz files without suffix. The last one has the test images."""
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
IMAGE_SHAPE = (32, 32, 3)
_IMAGES_AT_ONCE = 4096


def cifar5m(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """Load CIFAR-5M as batches. part0 to part4 are for training and part5 is for evaluation.

    A part is one npz file of the publication. Parts are converted to TFDS data sets if needed. The
    arguments are those of `mupax.train.data.load`.
    """
    vision = images.vision_model(config.name, model, CLASSES)
    images.check_size(config.name, vision, IMAGE_SHAPE[0], IMAGE_SHAPE[-1])
    parts = prepared_parts(config.data_dir, note)
    sources = [builders.Source(builder, "train") for builder in parts]
    marks: list[bytes] = []
    for source in sources:
        # The first and the last image stand for a part, because a digest of all images reads
        # gigabytes.
        marks += _marks(source)
    return images.ImageData(
        config,
        published.labelled(sources[:-1], "image", "label", vision.channels),
        published.labelled(sources[-1:], "image", "label", vision.channels),
        views=(images.shift_and_flip, images.as_is),
        seed=seed,
        class_names=CLASSES,
        facts={"digest": cache.digest(*marks)},
    )


def _marks(source: Sequence) -> list[bytes]:
    """Return bytes that identify a part of CIFAR-5M, for its digest.

    They are its number of images, its first image and its last image.
    """
    length = len(source).to_bytes(8, "little")
    first = source[0]["image"].tobytes()
    last = source[len(source) - 1]["image"].tobytes()
    return [length, first, last]


def prepared_parts(data_dir: str | None, note: cache.Note) -> list[Any]:
    """Return the TFDS builders of all parts in order. Convert parts from their npz if needed.

    Part N is converted from `partN.npz` in the data folder. A converted part needs no npz.

    Args:
        data_dir: Folder of the npz files and of prepared data. None is the folder in the cache.
        note: Function that takes one line of text about work that takes long.

    Raises:
        DataError: A part is neither converted nor there as npz. Nothing is converted then.
    """
    base = cache.data_sets(data_dir)
    files: dict[str, Path] = {}
    for part in PARTS:
        prepared = base / "cifar5m" / part / "1.0.0/dataset_info.json"
        if not prepared.exists():
            files[part] = base / f"{part}.npz"

    missing = []
    for file in files.values():
        if not file.exists():
            missing.append(file.name)
    if missing:
        raise DataError(
            f"cifar5m needs {', '.join(missing)} in {base}; get them from {SOURCE}, "
            "or set data.data_dir to the folder that has them"
        )
    parts = []
    for part in PARTS:
        parts.append(
            builders.embedded(Cifar5m, data_dir, note, config=part, source=files.get(part))
        )
    return parts


class Cifar5m(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of one part of CIFAR-5M.

    The images are 32 x 32 pixels in colour. They have CIFAR-10's classes, and were made by a
    diffusion model. Each part is a builder config. TFDS prepares a config completely or not at all,
    so a preparation that was stopped continues with the part that was not finished.

    Args:
        source: npz file of the part. None for a part that is already prepared.
    """

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path: Any = Path(__file__).parent

    def __init__(self, *, source: Path | None = None, **kwargs: Any) -> None:
        self._source = source
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Tensor(shape=IMAGE_SHAPE, dtype=np.uint8),
            "label": tfds.features.ClassLabel(names=CLASSES),
        }
        return builders.info(self, features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        assert self._source is not None
        for i, (image, label) in enumerate(examples(self._source)):
            yield i, {"image": image, "label": label}


def examples(path: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Yield every image of a part, uint8 [32, 32, 3], and its label. 4096 images are read at once.

    Raises:
        DataError: The file is damaged or is not a part of CIFAR-5M.
        ReadError: The disk does not answer.
    """
    again = f"get it again from {SOURCE}{path.name}"
    try:
        with zipfile.ZipFile(path) as archive, contextlib.ExitStack() as stack:
            for name in "XY":
                _check_ratio(archive.getinfo(f"{name}.npy"))
            x_stream = stack.enter_context(archive.open("X.npy"))
            y_stream = stack.enter_context(archive.open("Y.npy"))
            shape, x_dtype = _header("X", x_stream)
            label_shape, y_dtype = _header("Y", y_stream)
            if shape[1:] != IMAGE_SHAPE or label_shape != shape[:1]:
                raise ValueError(f"has X {shape} and Y {label_shape}, not (N, 32, 32, 3) and (N,)")
            for first in range(0, shape[0], _IMAGES_AT_ONCE):
                count = min(_IMAGES_AT_ONCE, shape[0] - first)
                x = _read(x_stream, x_dtype, (count, *IMAGE_SHAPE))
                y = _read(y_stream, y_dtype, (count,))
                if y.min() < 0 or y.max() >= len(CLASSES):
                    raise ValueError(f"has labels outside 0 to {len(CLASSES) - 1}")
                yield from zip(x, map(int, y), strict=True)
    except ValueError as error:
        raise DataError(f"{path} {error!s:.300}; {again}") from error
    except (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        if is_system_error(error):
            raise unreadable(f"cannot read {path}: {error.strerror}", error) from error
        raise DataError(f"{path} is not a whole npz file: {error!s:.300}; {again}") from error


def _check_ratio(member: zipfile.ZipInfo) -> None:
    """Raise `ValueError` if an array unpacks to much more than its size on disk."""
    if member.file_size > max(WINDOW_BYTES, DEFAULT_LIMITS.ratio * member.compress_size):
        raise ValueError(
            f"has an array {member.filename} that unpacks from {member.compress_size:,} bytes to "
            f"{member.file_size:,}, more than {DEFAULT_LIMITS.ratio} times as many"
        )


def _header(name: str, stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Read the header of an array, and return its shape and dtype.

    Args:
        name: "X" for the images, which must be uint8, or "Y" for the labels.
        stream: Content of the .npy. It is at the first value afterwards.

    Raises:
        ValueError: The header is damaged, or the array has other values than integers in C order.
    """
    try:
        shape, fortran, dtype = array_header(stream)
    except (OSError, zipfile.BadZipFile, zlib.error):
        raise
    # NumPy parses the header as a Python literal, so a damaged header may raise any exception.
    except Exception as error:
        raise ValueError(f"has no array {name}: {error}") from error
    if fortran or dtype.kind not in "iu" or (name == "X" and dtype != "uint8"):
        raise ValueError(f"has an array {name} of {dtype}, not of whole numbers in C order")
    return shape, dtype


def _read(stream: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Read the next values of an array in this shape. Raise `ValueError` if there are fewer."""
    num_bytes = math.prod(shape) * dtype.itemsize
    data = stream.read(num_bytes)
    if len(data) != num_bytes:
        raise ValueError("ends too early")
    return np.frombuffer(data, dtype).reshape(shape)
