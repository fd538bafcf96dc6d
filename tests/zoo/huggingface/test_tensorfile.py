"""Files of tensors: what is written is read again, and what a stranger may have written is refused by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mupax.zoo.huggingface.tensorfile import INDEX, SINGLE, TensorFileError, Tensors, write_tensors

pytestmark = pytest.mark.core

ARRAYS = {
    "b.weight": np.arange(35, dtype=np.float32).reshape(5, 7) / 3,
    "a": np.float32([1.5, -2.25, 1e-3]),
    "c": np.ones((2, 3, 11), np.float32),
}


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_is_read(dtype: Any, tmp_path: Path) -> None:
    assert write_tensors(tmp_path, ARRAYS.items(), dtype=dtype) == [tmp_path / SINGLE]
    tensors = Tensors(tmp_path)
    assert tensors.shapes == {name: value.shape for name, value in ARRAYS.items()}
    for name, value in ARRAYS.items():
        read = tensors.read(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, value.astype(jnp.dtype(dtype)).astype(np.float32))


def test_large_weights_are_written_in_parts_with_an_index(tmp_path: Path) -> None:
    files = write_tensors(tmp_path, ARRAYS.items(), shard_bytes=150)
    assert [file.name for file in files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in ARRAYS.values())
    for path in (tmp_path, tmp_path / INDEX):
        tensors = Tensors(path)
        for name, value in ARRAYS.items():
            np.testing.assert_array_equal(tensors.read(name), value)
    assert Tensors(files[0]).shapes == {"b.weight": (5, 7)}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [INDEX, *(file.name for file in files)]
    )


def test_a_transposed_array_is_stored_as_it_is_seen(tmp_path: Path) -> None:
    write_tensors(tmp_path, [("t", ARRAYS["b.weight"].T)])
    np.testing.assert_array_equal(Tensors(tmp_path).read("t"), ARRAYS["b.weight"].T)


def test_values_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="float16 cannot hold"):
        write_tensors(tmp_path, [("large", np.float32([1e5]))], dtype="float16")
    write_tensors(tmp_path, [("large", np.float32([1e5]))], dtype="bfloat16")


GOOD = ({"a": entry([2], 0, 8)}, bytes(8), None)
BROKEN = {
    "a header longer than the file": (GOOD[0], bytes(8), 2**60),
    "a header of no length": (GOOD[0], bytes(8), 0),
    "a header that ends in the data": (GOOD[0], bytes(8), 60),
    "no JSON": (b"{" * 9, b"", None),
    "nested too deep": (b'{"a":' + b"[" * 100_000, b"", None),
    "overlapping": ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12), None),
    "the same bytes twice": ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8), None),
    "a hole": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12), None),
    "bytes left over": (GOOD[0], bytes(12), None),
    "too few bytes": (GOOD[0], bytes(7), None),
    "a shape of another size": ({"a": entry([3], 0, 8)}, bytes(8), None),
    "a shape beyond 64 bits": ({"a": entry([2**40, 2**40], 0, 8)}, bytes(8), None),
    "a negative size": ({"a": entry([-2], 0, 8)}, bytes(8), None),
    "offsets the wrong way": ({"a": entry([2], 8, 0)}, bytes(8), None),
    "whole numbers": ({"a": entry([8], 0, 8, "I8")}, bytes(8), None),
    "8-bit floats": ({"a": entry([8], 0, 8, "F8_E4M3")}, bytes(8), None),
    "an unknown type": ({"a": entry([8], 0, 8, "F7")}, bytes(8), None),
    "an empty tensor": ({"a": entry([0, 2**62], 0, 0)}, b"", None),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused(case: tuple[Any, bytes, int | None], tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="safetensors"):
        Tensors(write(tmp_path / "x.safetensors", *case))


def test_control_the_file_that_is_broken_above_is_good(tmp_path: Path) -> None:
    np.testing.assert_array_equal(
        Tensors(write(tmp_path / "x.safetensors", *GOOD)).read("a"), [0, 0]
    )


def indexed(folder: Path, weight_map: Any) -> Path:
    write(folder / "part.safetensors", *GOOD)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


OUTSIDE = [
    "../part.safetensors", "sub/part.safetensors", "/etc/part.safetensors", "..\\part.safetensors",
    "C:part.safetensors", ".part.safetensors", "part.safetensors\0", "part\n.safetensors", "part.bin", "", "..",
    None, 7, ["part.safetensors"], {},
]  # fmt: skip


@pytest.mark.parametrize("file", OUTSIDE, ids=repr)
def test_an_index_names_only_files_of_its_folder(file: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "in" / "sub"):
        write(folder / "part.safetensors", *GOOD)
    with pytest.raises(TensorFileError, match="only name"):
        Tensors(indexed(tmp_path / "in", {"a": file}))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, "no such file"),
        ({"a": "part.safetensors", "b": "part.safetensors"}, "does not hold it"),
        ({}, "no weight_map"),
        (["a"], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_an_index_fits_its_files(weight_map: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match=message):
        Tensors(indexed(tmp_path, weight_map))


def test_control_a_good_index_is_read(tmp_path: Path) -> None:
    assert Tensors(indexed(tmp_path, {"a": "part.safetensors"})).shapes == {"a": (2,)}


def test_pickles_are_named_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(TensorFileError, match=r"pytorch_model\.bin is a pickle"):
        Tensors(tmp_path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)  # reading it would wait for ever
    for path in (tmp_path, tmp_path / SINGLE, tmp_path / "none"):
        with pytest.raises(TensorFileError):
            Tensors(path)
