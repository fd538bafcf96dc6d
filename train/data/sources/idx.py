"""Loaders of grey images in IDX files, the format of MNIST: `idx:FOLDER`, and `fashion` of Debian.

A folder has train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
t10k-labels-idx1-ubyte, each with or without .gz. A file has two zero bytes, the type of its values
(8 is uint8), the number of dimensions, the size of each dimension as four bytes, most significant
first, and the values in row-major order (Y. LeCun, "The IDX file format").
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
from mupax.train.data.interface import DataError, is_system_error, unreadable
from mupax.train.data.records import bounds
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder of the files of dataset-fashion-mnist, a package of Debian and Ubuntu."""
FASHION = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""Files of training images, training labels, test images and test labels."""
_BYTES = 8
_UNCHECKED_BYTES = 1 << 28
"""Largest array in bytes whose file may be compressed at any ratio.

A larger array may be at most limits.ratio / 10 times as large as its file on disk.
"""


class _Greys:
    """Sequence of labelled grey images in memory. An item is pixels [h, w, 1] and a label.

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
    """Load Fashion-MNIST (Xiao et al. 2017): 60,000 training and 10,000 test images of clothes.

    Training images are shifted and mirrored. The arguments are those of `mupax.train.data.load`.
    `config.data_dir` is the folder of the files. The default is `DEBIAN`.

    Raises:
        DataError: The files are missing or damaged, or do not fit the model.
    """
    folder = path_of(config.data_dir) if config.data_dir else DEBIAN
    if not (folder / FILES[0]).exists() and not (folder / f"{FILES[0]}.gz").exists():
        raise DataError(
            f"Fashion-MNIST is not in {folder}; `apt-get install dataset-fashion-mnist` puts it "
            "there on Debian and Ubuntu (31 MB), or write data.name as idx:FOLDER with a folder that "
            "has its four IDX files"
        )
    # Clothes may be mirrored, unlike digits.
    return _open(config, model, seed, folder, list(FASHION), images.shift_and_flip)


def own_files(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """Load a user's folder of IDX files as batches.

    Classes are named by their labels, "0", "1" and so on. Training images are rotated, scaled and
    shifted a little, and not mirrored. The arguments are those of `mupax.train.data.load`.
    `config.name` is idx:FOLDER.
    """
    folder = path_of(config.name.removeprefix("idx:"))
    return _open(config, model, seed, folder, None, images.jitter)


def sizes(config: DataConfig) -> ImageSizes | None:
    """Return the number of classes, the channels and the image size that a folder of IDX files has.

    They are the defaults of a model for this data. The result is None if a file is missing or
    damaged, if images are not square, or if there are no labels.

    Args:
        config: Data settings. `config.name` is idx:FOLDER.
    """
    folder = path_of(config.name.removeprefix("idx:"))
    try:
        pixels = array(folder / FILES[0], config.limits)
        labels = array(folder / FILES[1], config.limits)
        test_labels = array(folder / FILES[3], config.limits)
    except DataError:
        # The run raises this error when it loads the data.
        return None
    if pixels.ndim != 3 or pixels.shape[1] != pixels.shape[2]:
        return None
    if not labels.size or not test_labels.size:
        return None
    # A class may occur among the test labels alone.
    num_classes = int(max(labels.max(), test_labels.max())) + 1
    return ImageSizes(num_classes, 1, pixels.shape[1], scaled=False)


def _open(
    config: DataConfig,
    model: ModelConfig,
    seed: int,
    folder: Path,
    names: list[str] | None,
    view: images.View,
) -> images.ImageData:
    """Return the images of a folder as batches.

    Args:
        names: Names of the classes by label. None names them by their labels, "0", "1", ...
        view: View that augments training images. Evaluation images are shown unchanged.

    Raises:
        DataError: A file is missing or damaged, or images, labels and model do not fit each other.
    """
    x, y, x_test, y_test = (array(folder / name, config.limits) for name in FILES)
    _check_pair(folder, "train", x, y)
    _check_pair(folder, "t10k", x_test, y_test)

    largest = max(y.max(), y_test.max())
    classes = names or [str(label) for label in range(int(largest) + 1)]
    if largest >= len(classes):
        raise DataError(
            f"{folder} has labels up to {largest}, and {config.name} has {len(classes)} classes"
        )
    height, width = x.shape[1:]
    if height != width or x_test.shape[1:] != (height, width):
        raise DataError(
            f"{folder} has images of {x.shape[1:]} and {x_test.shape[1:]} pixels; "
            "only squares of one size are read"
        )
    vision = images.vision_model(config.name, model, classes)
    images.check_size(config.name, vision, height, channels=1)
    return images.ImageData(
        config,
        _Greys(x, y),
        _Greys(x_test, y_test),
        views=(view, images.as_is),
        seed=seed,
        class_names=classes,
        facts={"digest": cache.digest(*(part.tobytes() for part in (x, y, x_test, y_test)))},
    )


def _check_pair(folder: Path, side: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Raise `DataError` unless there are as many images as labels, and at least one.

    Args:
        folder: Folder of the files, for the message.
        side: Beginning of the files' names, "train" or "t10k", for the message.
        pixels: Images, which must be [N, h, w].
        labels: Labels, which must be [N].
    """
    is_pair = pixels.ndim == 3 and labels.ndim == 1 and len(pixels) == len(labels)
    if not is_pair or not len(pixels):
        raise DataError(
            f"{folder}: {side}-images-idx3-ubyte has the shape {pixels.shape} and "
            f"{side}-labels-idx1-ubyte {labels.shape}, not (N, height, width) and (N,) with one N "
            "above 0; give images and labels of one data set"
        )


def array(path: Path, limits: LimitsConfig = DEFAULT_LIMITS) -> np.ndarray:
    """Read an IDX file of uint8 and return its array, which is read-only.

    Args:
        path: File without the suffix .gz. If it does not exist, the file with .gz is read.

    Raises:
        DataError: There is no such file, or it is damaged, of another type or larger than the
            limits.
        ReadError: The disk does not answer.
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
        if is_system_error(error):
            raise unreadable(f"{file} cannot be read: {error.strerror}", error) from error
        raise DataError(f"{file} cannot be read: {error}; get it again") from error


def _array(file: Path, stream: Any, stored_bytes: int, limits: LimitsConfig) -> np.ndarray:
    """Read the array of an opened IDX file.

    At most one byte more than the header says is unpacked, so that a harmful file fills no memory.

    Args:
        stream: Unpacked content of the file, from its beginning.
        stored_bytes: Size of the file on disk in bytes.

    Raises:
        DataError: The file is no IDX file of uint8, or is too short or too long.
        LimitError: The array is much larger than its file.
    """
    header = stream.read(4)
    if len(header) < 4 or header[:2] != b"\0\0":
        raise DataError(
            f"{file} is no IDX file: it begins with {header.hex() or 'nothing'}, not with two zero "
            "bytes"
        )
    kind, dimensions = header[2:4]
    if kind != _BYTES:
        raise DataError(
            f"{file} has values of IDX type {kind:#x}; only uint8 ({_BYTES:#x}) is read"
        )

    sizes = stream.read(4 * dimensions)
    starts = range(0, len(sizes), 4)
    shape = tuple(int.from_bytes(sizes[start : start + 4], "big") for start in starts)
    size = math.prod(shape)
    # Check the size in the header, before the values are unpacked.
    if size > max(_UNCHECKED_BYTES, limits.ratio * stored_bytes // 10):
        raise bounds.too_packed(str(file), 10 * size, stored_bytes, limits)

    # One byte more than the array has shows that a file is too long.
    content = stream.read(size + 1)
    header_bytes = 4 + len(sizes)
    if len(sizes) != 4 * dimensions or len(content) != size:
        more = " or more" if len(content) > size else ""
        raise DataError(
            f"{file} is not whole: {shape} values want {header_bytes + size} bytes, and it has "
            f"{header_bytes + len(content)}{more}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)
