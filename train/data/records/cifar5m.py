"""CIFAR-5M's own files, read a few images at a time: an npz is a zip of npy arrays, and its images are 3 GB.

`numpy.load` would hold a whole array in memory. Here the array is read as a stream, and whatever is not what the data
set says it is (array names, shapes, dtypes, lengths) is an error; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mupax.train.data.interface import DataError

if TYPE_CHECKING:
    import numpy as np

SOURCE = "https://storage.googleapis.com/gresearch/cifar5m/"
PARTS = [f"part{i}" for i in range(6)]
TEST_PART = PARTS[-1]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
IMAGE_SHAPE = (32, 32, 3)
_IMAGES_AT_ONCE = 4096


def examples(path: Path) -> Iterator[tuple[np.ndarray, int]]:
    """(image uint8 [32, 32, 3], label) of every image in a part, in bounded memory.

    Raises:
        DataError: the file is not whole, or is not a part of CIFAR-5M.
    """
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive, contextlib.ExitStack() as stack:
            pixels, shape = _open(archive, stack, "X", path)
            labels, label_shape = _open(archive, stack, "Y", path)
            if shape[1:] != IMAGE_SHAPE or label_shape != shape[:1]:
                raise DataError(
                    f"{path} has X {shape} and Y {label_shape}, not (N, 32, 32, 3) and (N,); {_again(path)}"
                )
            for first in range(0, shape[0], _IMAGES_AT_ONCE):
                count = min(_IMAGES_AT_ONCE, shape[0] - first)
                x = _read(pixels, count, IMAGE_SHAPE, path)
                y = _read(labels, count, (), path)
                if y.min() < 0 or y.max() >= len(CLASSES):
                    raise DataError(f"{path} has labels outside 0 to {len(CLASSES) - 1}; {_again(path)}")
                yield from zip(x.astype(np.uint8), map(int, y), strict=True)
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a whole npz file: {error}; {_again(path)}") from error


def _again(path: Path) -> str:
    return f"get it again from {SOURCE}{path.name}"


class _Array:
    """The stream of an npy array's values and their dtype."""

    def __init__(self, stream: IO[bytes], dtype: np.dtype) -> None:
        self.stream, self.dtype = stream, dtype


def _open(
    archive: zipfile.ZipFile, stack: contextlib.ExitStack, name: str, path: Path
) -> tuple[_Array, tuple[int, ...]]:
    """The array `name` of the archive, ready to be read from its start, and its shape."""
    from numpy.lib import format as npy

    stream = stack.enter_context(archive.open(f"{name}.npy"))
    try:
        version = npy.read_magic(stream)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = header(stream)
    except ValueError as error:
        raise DataError(f"{path} has no array {name}: {error}; {_again(path)}") from error
    if fortran or dtype.kind not in "iu" or dtype.hasobject or (name == "X" and dtype != "uint8"):
        raise DataError(f"{path} has an array {name} of {dtype}, not of whole numbers in C order; {_again(path)}")
    return _Array(stream, dtype), shape


def _read(array: _Array, count: int, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """The next `count` items of this shape."""
    import math

    import numpy as np

    size = count * math.prod(shape) * array.dtype.itemsize
    data = array.stream.read(size)
    if len(data) != size:
        raise DataError(f"{path} ends too early; {_again(path)}")
    return np.frombuffer(data, array.dtype).reshape(count, *shape)
