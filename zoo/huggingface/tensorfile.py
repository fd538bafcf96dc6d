"""Safetensors files of strangers: read without executing anything, and checked before a byte of data is used.

A model is one file, or several with an index `model.safetensors.index.json` that says which file holds which tensor.
The `safetensors` library checks each file (header length, offsets that overlap, leave holes or disagree with shapes);
what it does not know is checked here: types, empty tensors, and names in an index that point outside its folder.
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

from mupax.disk import copy, is_remote, read_json, shown
from mupax.errors import MupaxError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DType = Literal["float32", "bfloat16", "float16"]
READABLE = ("F32", "BF16", "F16")
"""Stored types that are weights; whole numbers and 8-bit floats are quantized and mean nothing without their scales."""

SHARD_BYTES = 5 * 10**9
"""Data of one file at most, unless a single tensor is larger."""

_BARE = re.compile(r'(?!\.)[^/\\:*?"<>|]*\.safetensors')
"""The name of a file without a folder, in any system's spelling."""
_OS_ERROR = re.compile(r"os error (\d+)")
"""Number of the system's error in the text of one of `safetensors`."""


class TensorFileError(MupaxError):
    """A file that holds no usable weights. The text says which, and what is wrong with it."""


class Tensors:
    """Tensors of a file or folder, read one at a time.

    Args:
        path: a .safetensors file, an index, or a folder that holds either.

    Attributes:
        path: as given.
        shapes: tensor name to shape, of every tensor, before any is read.

    Raises:
        TensorFileError, JsonError: nothing there, a file that is not safetensors, or an index that is no JSON or does not
            fit its files.
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
        """One tensor as float32.

        Raises:
            TensorFileError: the file changed since it was opened.
        """
        try:
            return np.asarray(self._files[name].get_tensor(name)).astype(np.float32)
        except (SafetensorError, ValueError, OSError) as error:
            raise TensorFileError(f"{self.path}: cannot read the tensor {name}: {error}") from error

    def _here(self, file: Path) -> Path:
        """The file, or its copy on this machine for as long as the tensors are read."""
        if not is_remote(file):
            return file
        if not file.is_file():
            raise TensorFileError(f"{file}: no such file")
        folder = tempfile.mkdtemp(prefix="mupax-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        copy(file, Path(folder) / file.name)
        return Path(folder) / file.name

    def _add(self, file: Path, names: list[str] | None = None) -> None:
        """Open a file for these tensors of it, or for all."""
        opened = _opened(self._here(file))
        stored = dict.fromkeys(opened.keys())
        for name in stored if names is None else names:
            if name not in stored:
                raise TensorFileError(
                    f"{self.path}: {shown(name)} is said to be in {file.name}, which does not hold it"
                )
            tensor = opened.get_slice(name)
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if dtype not in READABLE:
                raise TensorFileError(
                    f"{file.name}: the tensor {shown(name)} is {dtype}; only {', '.join(READABLE)} are read "
                    "(save a quantized model in floating point first)"
                )
            if not all(shape):
                raise TensorFileError(
                    f"{file.name}: the tensor {shown(name)} of shape {shape} is empty"
                )
            self.shapes[name], self._files[name] = shape, opened


def files_of_index(index: Path) -> dict[str, list[str]]:
    """Names of files to the tensors that an index says they hold.

    Args:
        index: the path of a model.safetensors.index.json.

    Raises:
        TensorFileError, JsonError: no index, or one that names files elsewhere.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TensorFileError(f"{index}: no weight_map from tensor names to files")
    parts: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.isprintable() or not _BARE.fullmatch(file):
            raise TensorFileError(
                f"{index}: {shown(name)} is said to be in {shown(file)}; an index may only name "
                ".safetensors files of its own folder"
            )
        parts.setdefault(file, []).append(name)
    return parts


def check_whole(folder: Path) -> None:
    """Refuse a folder of weights that lacks a part, or whose parts are not as long as their headers say.

    Raises:
        TensorFileError, JsonError: the text names the file.
    """
    parts = list(files_of_index(folder / INDEX)) if (folder / INDEX).is_file() else []
    missing = [part for part in parts if not (folder / part).is_file()]
    if missing:
        raise TensorFileError(
            f"{folder}: {INDEX} names {missing[0]}, which is not there; bring it back"
        )
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
    """Write tensors into `model.safetensors`, or into several files and their index where they are large.

    Args:
        folder: exists, and holds no weights.
        arrays: name and value, taken one by one: at most one file's worth is held.
        dtype: stored type.
        metadata: texts for every file's header.
        shard_bytes: data of one file at most.

    Returns:
        The files of tensors, in order.

    Raises:
        TensorFileError: a value that the type cannot hold.
    """
    parts: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        _save(waiting, folder / f".part-{len(parts)}.safetensors", dict(metadata or {}))
        parts.append(list(waiting))
        waiting.clear()

    for name, array in arrays:
        with np.errstate(over="ignore"):
            value = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
        if not np.isfinite(value).all() and np.isfinite(array).all():
            raise TensorFileError(
                f"{name} has values that {dtype} cannot hold; write float32 or bfloat16"
            )
        if waiting and sum(other.nbytes for other in waiting.values()) + value.nbytes > shard_bytes:
            flush()
        waiting[name] = value
        total += value.nbytes
    flush()
    count = len(parts)
    files = (
        [SINGLE]
        if count == 1
        else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    for i, file in enumerate(files):
        (folder / f".part-{i}.safetensors").replace(folder / file)
    if count > 1:
        weight_map = {
            name: file for file, names in zip(files, parts, strict=True) for name in names
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [folder / file for file in files]


def _save(arrays: dict[str, np.ndarray], file: Path, metadata: dict[str, str]) -> None:
    """Write a file of tensors. The library hides the error of a full disk in a text."""
    try:
        save_file(arrays, file, metadata=metadata)
    except SafetensorError as error:
        if code := _OS_ERROR.search(str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error
        raise


def _file_of(path: Path) -> Path:
    """The file to open for a path: itself, or what a folder holds."""
    if path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json")):
        return path
    if not path.is_dir():
        raise TensorFileError(f"{path}: no such file or folder of safetensors")
    if whole := next((path / name for name in (SINGLE, INDEX) if (path / name).is_file()), None):
        return whole
    if pickle := next(
        (file for ending in ("bin", "pt", "pth") for file in sorted(path.glob(f"*.{ending}"))), None
    ):
        raise TensorFileError(
            f"{path}: {pickle.name} is a pickle, which can run any code when it is opened; only safetensors is read. "
            "Most repositories offer it too; otherwise save the model again with `model.save_pretrained(FOLDER)`"
        )
    raise TensorFileError(f"{path}: holds neither {SINGLE} nor {INDEX}")


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise TensorFileError(f"{file}: no such file")
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, ValueError, OSError) as error:
        raise TensorFileError(
            f"{file}: not a whole safetensors file: {shown(str(error))}"
        ) from error
