"""Safetensors files from anyone: read without executing anything, checked before data is used.

A model is one file, or several with an index `model.safetensors.index.json`, which says which file
holds which tensor. The `safetensors` library checks each file: length of the header, and offsets
that overlap, leave holes or disagree with shapes. Checked here are types, empty tensors, and names
in an index that point outside of its folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mupax import MupaxError
from mupax.disk import copy, is_remote, read_json, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DType = Literal["float32", "bfloat16", "float16"]
READABLE = ("F32", "BF16", "F16")
"""Types of tensors that are read, by their names in safetensors.

Whole numbers and 8-bit floats are refused: they are quantized weights, which mean nothing without
their scales.
"""

SHARD_BYTES = 5 * 10**9
"""Largest size of the data in one file, in bytes. A single tensor may be larger."""

_BARE = re.compile(r'(?!\.)[^/\\:*?"<>|]*\.safetensors')
"""Name of a file without a folder, in any system's spelling."""
_OS_ERROR = re.compile(r"os error (\d+)")
"""Number of the system's error in the text of an error of `safetensors`."""


class TensorFileError(MupaxError):
    """Error about a file that holds no usable weights. The text names the file and the reason."""


class Tensors:
    """Tensors of a file or folder, read one at a time.

    Args:
        path: File that ends in .safetensors, an index, or a folder that holds either.

    Attributes:
        path: The path as given.
        shapes: Shape of every tensor by name, known before any tensor is read.

    Raises:
        TensorFileError: The path holds no safetensors files, an index does not fit its files, or a
            tensor is empty or not float32, bfloat16 or float16.
        JsonError: The index is no JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        file = _file_of(path)
        if file.name.endswith(".json"):
            for part, names in files_of_index(file).items():
                self._add(file.parent / part, names)
        else:
            self._add(file)

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as float32.

        Args:
            name: A name in `shapes`.

        Raises:
            TensorFileError: The tensor cannot be read, because the file was cut off since it was
                opened, for example.
        """
        try:
            tensor = self._files[name].get_tensor(name)
            # NumPy has no bfloat16 of its own, and weights are scaled in float32.
            return np.asarray(tensor).astype(np.float32)
        except (SafetensorError, ValueError, OSError) as error:
            raise TensorFileError(f"{self.path}: cannot read the tensor {name}: {error}") from error

    def _local(self, file: Path) -> Path:
        """Return the path of a file on this machine. A file in a bucket is copied first.

        The copy is in a temporary folder, which is deleted with this object.

        Raises:
            TensorFileError: There is no such file in the bucket.
        """
        if not is_remote(file):
            return file
        if not file.is_file():
            raise TensorFileError(f"{file}: no such file")
        folder = tempfile.mkdtemp(prefix="mupax-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        local_file = Path(folder) / file.name
        copy(file, local_file)
        return local_file

    def _add(self, file: Path, names: list[str] | None = None) -> None:
        """Open a file and add its tensors to `shapes`, without reading their data.

        Args:
            names: Names of the tensors that an index says are in the file. `None` adds all.

        Raises:
            TensorFileError: The file is damaged, lacks a tensor, or has one that is empty or of a
                type not in `READABLE`.
        """
        opened = _opened(self._local(file))
        # A dictionary rather than a set: tensors are added in the order of the file.
        names_in_file = dict.fromkeys(opened.keys())
        for name in names_in_file if names is None else names:
            if name not in names_in_file:
                raise TensorFileError(
                    f"{self.path}: {shown(name)} is said to be in {file.name}, "
                    "which does not hold it"
                )
            # A slice shows type and shape from the header, without reading the data.
            tensor = opened.get_slice(name)
            dtype = tensor.get_dtype()
            shape = tuple(tensor.get_shape())
            if dtype not in READABLE:
                raise TensorFileError(
                    f"{file.name}: the tensor {shown(name)} is {dtype}; only "
                    f"{', '.join(READABLE)} are read "
                    "(save a quantized model in floating point first)"
                )
            if not all(shape):
                raise TensorFileError(
                    f"{file.name}: the tensor {shown(name)} of shape {shape} is empty"
                )
            self.shapes[name] = shape
            self._files[name] = opened


def files_of_index(index: Path) -> dict[str, list[str]]:
    """Return the names of the tensors that an index says are in each file, by name of the file.

    Args:
        index: Path of a `model.safetensors.index.json`.

    Raises:
        TensorFileError: The index names no tensors, or files outside of its folder.
        JsonError: The index is no JSON.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TensorFileError(f"{index}: no weight_map from tensor names to files")
    parts: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # An index comes from anyone: a name such as ../secret must not be read.
        if not isinstance(file, str) or not file.isprintable() or not _BARE.fullmatch(file):
            raise TensorFileError(
                f"{index}: {shown(name)} is said to be in {shown(file)}; an index may only name "
                ".safetensors files of its own folder"
            )
        parts.setdefault(file, []).append(name)
    return parts


def check_whole(folder: Path) -> None:
    """Raise an error if a folder of weights lacks a file, or if a file is cut off or damaged.

    Files that can be missing are those that the index names. A folder without an index and without
    .safetensors files is no error.

    Raises:
        TensorFileError: A file is missing or incomplete. The text names the file.
        JsonError: The index is no JSON.
    """
    index = folder / INDEX
    if index.is_file():
        for part in files_of_index(index):
            if not (folder / part).is_file():
                raise TensorFileError(
                    f"{folder}: {INDEX} names {part}, which is not there; bring it back"
                )
    # Opening a file compares its length with the header, so it finds a truncated file.
    for file in sorted(folder.glob("*.safetensors")):
        _opened(file)


def write_tensors(
    folder: Path,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: DType = "float32",
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write tensors into `model.safetensors`, or into several files with an index.

    After an error, hidden files `.part-N.safetensors` may remain in the folder.

    Args:
        folder: Folder that exists and holds no weights yet.
        arrays: Name and value of every tensor. The tensors of at most one file are held in memory.
        dtype: Stored type, by default "float32".
        metadata: Texts for the header of every file. `None` writes none.
        shard_bytes: Largest size of the data in one file, in bytes. A single tensor may be larger.

    Returns:
        The files with tensors, in order.

    Raises:
        TensorFileError: The type cannot hold a value.
        OSError: The disk cannot be written, because it is full for example.
    """
    # Files get their final names at the end, because these contain the number of files.
    names_by_part: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    waiting_bytes = 0
    total_bytes = 0

    def write_waiting() -> None:
        part = folder / f".part-{len(names_by_part)}.safetensors"
        _save(waiting, part, dict(metadata or {}))
        names_by_part.append(list(waiting))
        waiting.clear()

    for name, array in arrays:
        # Overflow is reported below, and not by NumPy's warning.
        with np.errstate(over="ignore"):
            value = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
        if not np.isfinite(value).all() and np.isfinite(array).all():
            raise TensorFileError(
                f"{name} has values that {dtype} cannot hold; write float32 or bfloat16"
            )
        if waiting and waiting_bytes + value.nbytes > shard_bytes:
            write_waiting()
            waiting_bytes = 0
        waiting[name] = value
        waiting_bytes += value.nbytes
        total_bytes += value.nbytes
    write_waiting()

    count = len(names_by_part)
    if count == 1:
        files = [SINGLE]
    else:
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        (folder / f".part-{i}.safetensors").replace(folder / file)
    if count > 1:
        weight_map = {}
        for file, names in zip(files, names_by_part, strict=True):
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [folder / file for file in files]


def _save(arrays: dict[str, np.ndarray], file: Path, metadata: dict[str, str]) -> None:
    """Write a file of tensors. Raise `OSError` for an error of the system, such as a full disk.

    An existing file is replaced.
    """
    try:
        save_file(arrays, file, metadata=metadata)
    except SafetensorError as error:
        # safetensors reports an error of the system only as text: "... (os error 28)".
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(file)) from error


def _file_of(path: Path) -> Path:
    """Return the file of tensors or index to open for a path, which may be their folder.

    Raises:
        TensorFileError: There is no such file. The text says so if a folder has pickles instead.
    """
    if path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json")):
        return path
    if not path.is_dir():
        raise TensorFileError(f"{path}: no such file or folder of safetensors")
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            return path / name
    for ending in ("bin", "pt", "pth"):
        pickles = sorted(path.glob(f"*.{ending}"))
        if pickles:
            raise TensorFileError(
                f"{path}: {pickles[0].name} is a pickle, which can run any code when it is opened; "
                "only safetensors is read. Most repositories offer it too; otherwise save the "
                "model again with `model.save_pretrained(FOLDER)`"
            )
    raise TensorFileError(f"{path}: holds neither {SINGLE} nor {INDEX}")


def _opened(file: Path) -> Any:
    """Open a file with `safetensors`, which checks its header and length.

    Raises:
        TensorFileError: There is no such file, or it is damaged.
    """
    if not file.is_file():
        raise TensorFileError(f"{file}: no such file")
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, ValueError, OSError) as error:
        raise TensorFileError(
            f"{file}: not a whole safetensors file: {shown(str(error))}"
        ) from error
