"""Files as users have them: texts, records, and folders of images."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

COLOURS = {"blue": (10, 20, 250), "green": (20, 240, 30), "red": (230, 10, 20)}


def write(path: Path | str, content: str | bytes) -> Path:
    """Write a file and the folders above it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_files(folder: Path | str, files: Mapping[str, str]) -> Path:
    """Write files, given by their name below the folder. Return the folder."""
    for name, content in files.items():
        write(Path(folder) / name, content)
    return Path(folder)


def json_lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd_frames(content: bytes) -> bytes:
    """Compress into two frames, as parallel compressors do."""
    codec = pyarrow.Codec("zstd")
    return b"".join(codec.compress(part, asbytes=True) for part in (content[:500], content[500:]))


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd_frames,
}


def write_rows(path: Path | str, rows: Iterable[Any]) -> Path:
    """Write records in the format that the suffix names: a table, or JSON lines, maybe packed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pyarrow.Table.from_pylist([*rows])
        parquet.write_table(table, path, row_group_size=37)
    else:
        pack = PACKERS.get(path.suffix, bytes)
        path.write_bytes(pack(json_lines(rows)))
    return path


def write_texts(path: Path | str, texts: Iterable[str | None], field: str = "text") -> Path:
    """Write a record for each text, as `write_rows` does."""
    return write_rows(path, [{"id": i, field: text} for i, text in enumerate(texts)])


def write_image(path: Path | str, pixels: np.ndarray, **options: Any) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_pictures(folder: Path | str, count: int = 17) -> Path:
    """Write a folder of images per colour. Their sizes and formats vary."""
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        for i in range(count):
            noise = rng.integers(-9, 10, (13 + i, 29 - i, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            suffix = "jpg" if i % 2 else "png"
            write_image(Path(folder) / name / f"{i}.{suffix}", pixels)
    return Path(folder)


def write_greys(folder: Path | str, count: int = 3) -> None:
    """Write small images of which no two are alike."""
    for i in range(count):
        value = len(str(folder)) + 20 * i
        write_image(Path(folder) / f"{i}.png", np.full((8, 9), value, np.uint8))
