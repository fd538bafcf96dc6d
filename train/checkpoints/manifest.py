"""The manifest of a checkpoint: what must be in it, to the bit. A checkpoint without its whole manifest does not exist.

It holds two lists. Every array has a digest of each shard, taken from memory when it was saved: what comes back is compared
with what was there, whatever mesh it comes back to. Every file has its size and digest, taken from the disk after the
arrays were read back from it: damage is found before anything is loaded, without building the model.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from mupax.errors import MupaxError
from mupax.train.checkpoints import digests
from mupax.zoo.checked_json import JsonError, read_json

NAME = "manifest.json"
FORMAT = "mupax-checkpoint-1"


class DamagedError(MupaxError):
    """A checkpoint that is not what was saved. The text names the file or array."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done, which is the checkpoint's name too.
        data: the data's facts.
        arrays: name to shape, dtype and shards, each an index with its digest.
        files: path inside the checkpoint to size in bytes and digest.
    """

    step: int
    data: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    files: dict[str, list[Any]]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first: those that have a manifest."""
    found = (path.parent.name for path in folder.glob(f"*/{NAME}"))
    return sorted(int(name) for name in found if name.isdigit())


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest whole or not at all."""
    body = dataclasses.asdict(manifest)
    text = json.dumps({"format": FORMAT, "digest": _digest_of(body), "manifest": body})
    temporary = folder / f".{NAME}.partial"
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / NAME)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, itself verified.

    Raises:
        DamagedError: missing, edited, of another step than the folder's name says, or not one of this version's.
    """
    if not (folder / NAME).is_file():
        raise DamagedError(f"{NAME} is missing")
    try:
        whole = read_json(folder / NAME)
    except JsonError as error:
        raise DamagedError(f"{NAME}: {str(error).removeprefix(f'{folder / NAME}: ')}") from error
    if whole.get("format") != FORMAT:
        raise DamagedError(f"{NAME} has format {whole.get('format')!r:.40}; this version reads {FORMAT}")
    body = whole.get("manifest")
    if not isinstance(body, dict) or whole.get("digest") != _digest_of(body):
        raise DamagedError(f"{NAME} does not have the digest it names")
    try:
        found = Manifest(**body)
        _check_form(found)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise DamagedError(f"{NAME} has another form than this version's: {error!s:.200}") from error
    if folder.name.isdigit() and found.step != int(folder.name):
        raise DamagedError(f"{NAME} is of step {found.step}")
    return found


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written.

    Raises:
        DamagedError: they are not; the text names the first files, and the arrays that cannot be read from them.
    """
    found = read(folder)
    if problems := check_files(folder, found):
        raise DamagedError(", ".join([some(problems), *spoilt(folder, found)]))
    return found


def spoilt(folder: Path, manifest: Manifest) -> list[str]:
    """A line that names the arrays which a checkpoint's files no longer hold; none where they hold all."""
    arrays = digests.check_stored(folder, manifest.arrays)
    return [f"which spoils {some(arrays)}"] if arrays else []


def some(names: list[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def check_files(
    folder: Path, manifest: Manifest, part: tuple[int, int] = (0, 1), *, contents: bool = True
) -> list[str]:
    """What is wrong with the files, one line each; nothing where all is as it was written.

    Args:
        folder: of the checkpoint.
        manifest: its manifest.
        part: index and count, to look at every count-th file only.
        contents: read the files too, not their sizes alone.
    """
    wanted = dict(list(manifest.files.items())[part[0] :: part[1]])
    with ThreadPoolExecutor(digests.THREADS) as pool:
        found = pool.map(lambda path: _file_problem(folder / path, wanted[path], contents), wanted)
        return [f"{path} {problem}" for path, problem in zip(wanted, found, strict=True) if problem]


def _digest_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _file_problem(path: Path, written: Sequence[Any], contents: bool) -> str | None:
    try:
        size = written[0]
        if path.is_symlink() or not path.is_file():
            return "is missing"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes, not {size}"
        same = not contents or digests.of_file(path) == list(written)
        return None if same else "has other contents than were written"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _check_form(manifest: Manifest) -> None:
    """A manifest of a stranger may carry a right digest of anything."""
    if type(manifest.step) is not int or not isinstance(manifest.data, dict) or not manifest.files:
        raise ValueError("step, data or files")
    for path, (size, value) in manifest.files.items():
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or type(size) is not int or not isinstance(value, str):
            raise ValueError(f"the file {path[:60]!a}")
    for name, entry in manifest.arrays.items():
        axes = [(size, axis) for index, _ in entry["shards"] for size, axis in zip(entry["shape"], index, strict=True)]
        if not all(0 <= start <= stop <= size for size, (start, stop) in axes):
            raise ValueError(f"the array {name[:60]!a}")
