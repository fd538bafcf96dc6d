"""Grey images in IDX files, the format of MNIST and its relatives: `idx:FOLDER`, or `fashion`, Debian's Fashion-MNIST.

A folder has train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each with or
without .gz. A file is two zero bytes, the type of its values (8: uint8), how many dimensions it has, each dimension's size as
four bytes, most significant first, and the values in rows (Y. LeCun, "The IDX file format").
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.disk import path_of
from mupax.train.config.data import DEFAULT_LIMITS, ImageSizes, LimitsConfig
from mupax.train.data import cache, images
from mupax.train.data.interface import DataError
from mupax.train.data.records import bounds
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's and Ubuntu's package dataset-fashion-mnist puts its files."""
FASHION = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""Images and labels to train on, images and labels to test."""
_BYTES = 8
_UNCHECKED_BYTES = 1 << 28
"""Of an array, which is held in memory. A larger one has to be in a file of its size: a tenth of what the ratio allows."""


class _Greys:
    """Labelled grey images of two arrays.

    Args:
        pixels: uint8 [N, h, w].
        labels: uint8 [N].
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self._pixels = pixels
        self._labels = labels

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._pixels[index][..., None], int(self._labels[index])


def fashion(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """Fashion-MNIST (Xiao et al. 2017), 60,000 photographs of clothes and 10,000 to test, as batches.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.data_dir` is the folder of its files, Debian's unless
            given.
    """
    folder = path_of(config.data_dir) if config.data_dir else DEBIAN
    if not (folder / FILES[0]).exists() and not (folder / f"{FILES[0]}.gz").exists():
        raise DataError(
            f"Fashion-MNIST is not in {folder}; `apt-get install dataset-fashion-mnist` puts it there on Debian and Ubuntu (31 MB), or "
            "write data.name as idx:FOLDER with a folder that has its four IDX files"
        )
    # Clothes are as good in a mirror, which digits are not.
    return _open(config, model, seed, folder, list(FASHION), images.shift_and_flip)


def own_files(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """The images of a folder of IDX files as batches; classes are named by their numbers.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is idx:FOLDER.
    """
    return _open(
        config, model, seed, path_of(config.name.removeprefix("idx:")), None, images.jitter
    )


def sizes(config: DataConfig) -> ImageSizes | None:
    """Return the sizes of a model for a folder of IDX files; `None` where the files are not there or not of squares.

    Args:
        config: whose name is idx:FOLDER.
    """
    folder = path_of(config.name.removeprefix("idx:"))
    try:
        pictures, labels, test_labels = (array(folder / FILES[i], config.limits) for i in (0, 1, 3))
    except DataError:  # the run says it
        return None
    if (
        pictures.ndim != 3
        or pictures.shape[1] != pictures.shape[2]
        or not labels.size
        or not test_labels.size
    ):
        return None
    return ImageSizes(
        int(max(labels.max(), test_labels.max())) + 1, 1, pictures.shape[1], scaled=False
    )


def _open(
    config: DataConfig,
    model: ModelConfig,
    seed: int,
    folder: Path,
    names: list[str] | None,
    view: images.View,
) -> images.ImageData:
    x, y, x_test, y_test = (array(folder / name, config.limits) for name in FILES)
    for pixels, labels, side in ((x, y, "train"), (x_test, y_test, "t10k")):
        if pixels.ndim != 3 or labels.ndim != 1 or len(pixels) != len(labels) or not len(pixels):
            raise DataError(
                f"{folder} has {side} images {pixels.shape} and labels {labels.shape}; the files do not belong together"
            )
    classes = names or [str(label) for label in range(int(max(y.max(), y_test.max())) + 1)]
    if max(y.max(), y_test.max()) >= len(classes):
        raise DataError(
            f"{folder} has labels up to {max(y.max(), y_test.max())}, and {config.name} has {len(classes)} classes"
        )
    height, width = x.shape[1:]
    if height != width or x_test.shape[1:] != (height, width):
        raise DataError(
            f"{folder} has images of {x.shape[1:]} and {x_test.shape[1:]} pixels; only squares of one size are read"
        )
    images.check_size(
        config.name, images.vision_model(config.name, model, classes), height, channels=1
    )
    return images.ImageData(
        config,
        _Greys(x, y),
        _Greys(x_test, y_test),
        views=(view, images.as_is),
        seed=seed,
        class_names=classes,
        facts={"digest": cache.digest(*(part.tobytes() for part in (x, y, x_test, y_test)))},
    )


def array(path: Path, limits: LimitsConfig = DEFAULT_LIMITS) -> np.ndarray:
    """The array of an IDX file of uint8.

    Args:
        path: of the file, without .gz, which may be there instead.
        limits: bounds on what it may unpack to.

    Raises:
        DataError: there is none, or it is damaged, of another type or larger than the limits allow.
    """
    packed = path.with_name(f"{path.name}.gz")
    file = path if path.exists() or not packed.exists() else packed
    try:
        with file.open("rb") as stored:
            stream = gzip.GzipFile("", "rb", fileobj=stored) if file == packed else stored
            return _array(file, stream, bounds.size_of(stored), limits)
    except FileNotFoundError:
        raise DataError(
            f"no file {path} or {packed.name}; a folder of IDX files has {', '.join(FILES)}"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}; get it again") from error


def _array(file: Path, stream: Any, stored_bytes: int, limits: LimitsConfig) -> np.ndarray:
    """Return the array of an opened file. No more of it is unpacked than its header says.

    Args:
        stored_bytes: its size on disk.
        limits: bounds on what it may unpack to.
    """
    header = stream.read(4)
    if len(header) < 4 or header[:2] != b"\0\0":
        raise DataError(
            f"{file} is no IDX file: it begins with {header.hex() or 'nothing'}, not with two zero bytes"
        )
    kind, dimensions = header[2:4]
    if kind != _BYTES:
        raise DataError(
            f"{file} has values of IDX type {kind:#x}; only uint8 ({_BYTES:#x}) is read"
        )
    sizes = stream.read(4 * dimensions)
    shape = tuple(
        int.from_bytes(sizes[start : start + 4], "big") for start in range(0, len(sizes), 4)
    )
    size = math.prod(shape)
    if size > max(_UNCHECKED_BYTES, limits.ratio * stored_bytes // 10):
        raise bounds.too_packed(str(file), 10 * size, stored_bytes, limits)
    content = stream.read(size + 1)
    start = 4 + len(sizes)
    if len(sizes) != 4 * dimensions or len(content) != size:
        more = " or more" if len(content) > size else ""
        raise DataError(
            f"{file} is not whole: {shape} values want {start + size} bytes, and it has {start + len(content)}{more}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)
