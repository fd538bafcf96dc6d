"""CIFAR-5M (Nakkiran et al. 2021) from its own files, read a few images at a time: an npz is a zip of arrays, of 3 GB each.

`numpy.load` would hold a whole array in memory. Here the array is read as a stream, and whatever is not what the data
set says it is (array names, shapes, dtypes, lengths) is an error; nothing is unpickled.
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
from mupax.train.data.interface import DataError
from mupax.train.data.records import builders
from mupax.train.data.records.bounds import WINDOW_BYTES
from mupax.train.data.records.ids import array_header
from mupax.train.data.sources import published
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

SOURCE = "https://storage.googleapis.com/gresearch/cifar5m/"
PARTS = [f"part{i}" for i in range(6)]
"""The last is to test on."""
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
IMAGE_SHAPE = (32, 32, 3)
_IMAGES_AT_ONCE = 4096


def cifar5m(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """CIFAR-5M as batches: parts 0 to 4 to train on, part 5 to test on.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them.
    """
    vision = images.vision_model(config.name, model, CLASSES)
    images.check_size(config.name, vision, IMAGE_SHAPE[0], IMAGE_SHAPE[-1])
    sources = [
        builders.Source(builder, "train") for builder in prepared_parts(config.data_dir, note)
    ]
    return images.ImageData(
        config,
        published.labelled(sources[:-1], "image", "label", vision.channels),
        published.labelled(sources[-1:], "image", "label", vision.channels),
        views=(images.shift_and_flip, images.as_is),
        seed=seed,
        class_names=CLASSES,
        facts={"digest": cache.digest(*(part for source in sources for part in _marks(source)))},
    )


def _marks(source: Sequence) -> list[bytes]:
    """What tells a part of CIFAR-5M from any other: its length, first and last image."""
    return [
        len(source).to_bytes(8, "little"),
        *(source[i]["image"].tobytes() for i in (0, len(source) - 1)),
    ]


def prepared_parts(data_dir: str | None, note: cache.Note) -> list[Any]:
    """TFDS builders of all parts, each prepared from `partN.npz` in the data folder; one that is prepared needs no npz.

    Args:
        data_dir: data.data_dir, of the npz and of what is prepared; None is the folder of data sets in the cache.
        note: told what takes time.

    Raises:
        DataError: a part is neither prepared nor there as npz, said before any is prepared.
    """
    base = cache.data_sets(data_dir)
    version = "1.0.0/dataset_info.json"
    files = {
        part: base / f"{part}.npz"
        for part in PARTS
        if not (base / "cifar5m" / part / version).exists()
    }
    if missing := [file.name for file in files.values() if not file.exists()]:
        raise DataError(
            f"cifar5m needs {', '.join(missing)} in {base}; get them from {SOURCE}, "
            "or set data.data_dir to the folder that has them"
        )
    return [
        builders.embedded(Cifar5m, data_dir, note, config=part, source=files.get(part))
        for part in PARTS
    ]


class Cifar5m(tfds.core.GeneratorBasedBuilder):
    """One part of CIFAR-5M, 32 x 32 colour images of CIFAR-10's classes made by a diffusion model.

    A builder config per part: TFDS prepares a config in full or not at all, so a preparation that was stopped goes on
    with the part it was at.

    Args:
        source: the part's npz; only preparing needs it.
        **kwargs: of a TFDS builder.
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
    """(image uint8 [32, 32, 3], label) of every image in a part, in bounded memory.

    Raises:
        DataError: the file is not whole, or is not a part of CIFAR-5M.
    """
    again = f"get it again from {SOURCE}{path.name}"
    try:
        with zipfile.ZipFile(path) as archive, contextlib.ExitStack() as stack:
            for name in "XY":
                _check_ratio(archive.getinfo(f"{name}.npy"))
            streams = [stack.enter_context(archive.open(f"{name}.npy")) for name in "XY"]
            (shape, x_dtype), (label_shape, y_dtype) = map(_header, "XY", streams)
            if shape[1:] != IMAGE_SHAPE or label_shape != shape[:1]:
                raise ValueError(f"has X {shape} and Y {label_shape}, not (N, 32, 32, 3) and (N,)")
            for first in range(0, shape[0], _IMAGES_AT_ONCE):
                count = min(_IMAGES_AT_ONCE, shape[0] - first)
                x = _read(streams[0], x_dtype, (count, *IMAGE_SHAPE))
                y = _read(streams[1], y_dtype, (count,))
                if y.min() < 0 or y.max() >= len(CLASSES):
                    raise ValueError(f"has labels outside 0 to {len(CLASSES) - 1}")
                yield from zip(x, map(int, y), strict=True)
    except ValueError as error:
        raise DataError(f"{path} {error!s:.300}; {again}") from error
    except (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a whole npz file: {error!s:.300}; {again}") from error


def _check_ratio(member: zipfile.ZipInfo) -> None:
    """Refuse an array that unpacks to much more than its size on disk, as no images do."""
    if member.file_size > max(WINDOW_BYTES, DEFAULT_LIMITS.ratio * member.compress_size):
        raise ValueError(f"has an array of {member.file_size:,} bytes in {member.compress_size:,}")


def _header(name: str, stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of the array `name` of a part; the stream is then at its first value."""
    try:
        shape, fortran, dtype = array_header(stream)
    except (OSError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # NumPy parses the header as Python
        raise ValueError(f"has no array {name}: {error}") from error
    if fortran or dtype.kind not in "iu" or (name == "X" and dtype != "uint8"):
        raise ValueError(f"has an array {name} of {dtype}, not of whole numbers in C order")
    return shape, dtype


def _read(stream: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The next values of an array, of this shape."""
    data = stream.read(math.prod(shape) * dtype.itemsize)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("ends too early")
    return np.frombuffer(data, dtype).reshape(shape)
