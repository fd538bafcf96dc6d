"""What can happen to a checkpoint on a disk. Each kind changes one folder and says where; `scripts.campaigns.corruptions` uses them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from mupax.train.checkpoints import layout


def _files(folder: Path, at_least: int = 1) -> list[Path]:
    held = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != layout.MANIFEST
    ]
    return [path for path in held if path.stat().st_size >= at_least]


def _older(folder: Path) -> Path:
    return min(
        (path for path in folder.parent.iterdir() if path.name.isdigit()),
        key=lambda path: int(path.name),
    )


def flip(folder: Path, choose: random.Random) -> str:
    """One bit of one file, the file chosen by its size half of the time."""
    files = _files(folder)
    weights = [path.stat().st_size for path in files] if choose.random() < 0.5 else None
    path = choose.choices(files, weights)[0]
    content = bytearray(path.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)
    return path.name


def truncate(folder: Path, choose: random.Random) -> str:
    """One file cut at any length, also to nothing."""
    path = choose.choice(_files(folder))
    os.truncate(path, choose.randrange(path.stat().st_size))
    return path.name


def zero(folder: Path, choose: random.Random) -> str:
    """A stretch of one file written over with zeros, as a lost block of a disk is."""
    while True:
        path = choose.choice(_files(folder))
        content = bytearray(path.read_bytes())
        start = choose.randrange(len(content))
        stop = choose.choice(
            [len(content), min(len(content), start + choose.choice([1, 16, 512, 4096]))]
        )
        if any(content[start:stop]):
            content[start:stop] = bytes(stop - start)
            path.write_bytes(content)
            return path.name


def delete(folder: Path, choose: random.Random) -> str:
    """One file gone, or a whole folder."""
    path = choose.choice(
        [*_files(folder, 0), *(path for path in sorted(folder.rglob("*")) if path.is_dir())]
    )
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path.name


def swap(folder: Path, choose: random.Random) -> str:
    """Two files of one checkpoint exchanged."""
    while True:
        one, other = choose.sample(_files(folder, 0), 2)
        contents = one.read_bytes(), other.read_bytes()
        if contents[0] != contents[1]:
            one.write_bytes(contents[1])
            other.write_bytes(contents[0])
            return f"{one.name} and {other.name}"


def exchange(folder: Path, choose: random.Random) -> str:
    """A file of the same place in the step before, the folder of all arrays, or the whole step under this one's name."""
    older = _older(folder)
    while True:
        kind = choose.random()
        if kind < 0.1:
            shutil.rmtree(folder)
            shutil.copytree(older, folder)
            return "the whole checkpoint"
        if kind < 0.2:
            shutil.rmtree(folder / "state")
            shutil.copytree(older / "state", folder / "state")
            return "all arrays"
        path = choose.choice(_files(folder))
        before = older / path.relative_to(folder)
        if (
            not before.is_file()
        ):  # data files have names of their own: by what is beside them, in turn
            before = choose.choice(_files(older))
        if before.read_bytes() != path.read_bytes():
            shutil.copyfile(before, path)
            return path.name


def manifest_damage(folder: Path, choose: random.Random) -> str:
    """The manifest gone, cut, with a bit flipped, with one value edited, or of the step before."""
    path = folder / layout.MANIFEST
    content = bytearray(path.read_bytes())
    kind = choose.choice(["missing", "cut", "bit", "edited", "older"])
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        os.truncate(path, choose.randrange(len(content)))
    elif kind == "bit":
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
    elif kind == "older":
        shutil.copyfile(_older(folder) / layout.MANIFEST, path)
    else:
        whole = json.loads(content)
        body = whole["manifest"]
        name = choose.choice(sorted(body["files"]))
        edit = choose.choice(["file", "array", "drop", "step"])
        if edit == "file":
            body["files"][name][1] = "0" * 32
        elif edit == "drop":
            del body["files"][name]
        elif edit == "array":
            body["arrays"][choose.choice(sorted(body["arrays"]))]["shards"][0][1] = "0" * 32
        else:
            body["step"] += 1
        path.write_text(json.dumps(whole))
        kind = f"{edit} edited"
    return f"{layout.MANIFEST}, {kind}"


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "bit flipped": flip,
    "file cut": truncate,
    "zeros over a stretch": zero,
    "file or folder deleted": delete,
    "two files swapped": swap,
    "taken from the step before": exchange,
    "manifest damaged": manifest_damage,
}
