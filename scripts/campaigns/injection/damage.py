"""Kinds of damage to a checkpoint on a disk, which `scripts.campaigns.corruptions` does.

Each function damages the folder of one checkpoint, and returns the name of what it damaged.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from mupax.train.checkpoints import layout


def _files(folder: Path, at_least: int = 1) -> list[Path]:
    """Return the files of a checkpoint except the manifest, sorted.

    Args:
        at_least: Smallest size in bytes. Default: files that are not empty.
    """
    files = []
    # `rglob` has the order of the file system, and the damage must depend on the seed alone.
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != layout.MANIFEST and path.stat().st_size >= at_least:
            files.append(path)
    return files


def _older(folder: Path) -> Path:
    """Return the folder of the run's oldest checkpoint."""
    steps = [path for path in folder.parent.iterdir() if path.name.isdigit()]
    return min(steps, key=lambda path: int(path.name))


def flip(folder: Path, choose: random.Random) -> str:
    """Flip one bit of one file. Half of the time, large files are chosen more often."""
    files = _files(folder)
    weights = [path.stat().st_size for path in files] if choose.random() < 0.5 else None
    path = choose.choices(files, weights)[0]
    content = bytearray(path.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)
    return path.name


def truncate(folder: Path, choose: random.Random) -> str:
    """Cut one file to a shorter length, which may be 0."""
    path = choose.choice(_files(folder))
    os.truncate(path, choose.randrange(path.stat().st_size))
    return path.name


def zero(folder: Path, choose: random.Random) -> str:
    """Write zeros over a stretch of one file, as a lost block of a disk leaves it."""
    while True:
        path = choose.choice(_files(folder))
        content = bytearray(path.read_bytes())
        start = choose.randrange(len(content))
        length = choose.choice([1, 16, 512, 4096])
        stop = choose.choice([len(content), min(len(content), start + length)])
        # A stretch that has zeros already would not be damaged.
        if any(content[start:stop]):
            content[start:stop] = bytes(stop - start)
            path.write_bytes(content)
            return path.name


def delete(folder: Path, choose: random.Random) -> str:
    """Delete one file or one folder."""
    folders = [path for path in sorted(folder.rglob("*")) if path.is_dir()]
    path = choose.choice([*_files(folder, 0), *folders])
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return path.name


def swap(folder: Path, choose: random.Random) -> str:
    """Exchange the contents of two files that differ."""
    while True:
        first, second = choose.sample(_files(folder, 0), 2)
        first_content = first.read_bytes()
        second_content = second.read_bytes()
        if first_content != second_content:
            first.write_bytes(second_content)
            second.write_bytes(first_content)
            return f"{first.name} and {second.name}"


def exchange(folder: Path, choose: random.Random) -> str:
    """Replace one file, all arrays or the complete checkpoint by those of the older checkpoint."""
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
        source = older / path.relative_to(folder)
        if not source.is_file():
            # Files of arrays have random names, which differ from step to step.
            source = choose.choice(_files(older))
        if source.read_bytes() != path.read_bytes():
            shutil.copyfile(source, path)
            return path.name


def manifest_damage(folder: Path, choose: random.Random) -> str:
    """Delete, cut or edit the manifest, flip a bit of it, or replace it by the older one."""
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
        fields = json.loads(content)
        body = fields["manifest"]
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
        path.write_text(json.dumps(fields))
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
"""Kinds of damage by the names in the record."""
