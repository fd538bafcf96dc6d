"""Mark of a folder that a command makes: it says whether the folder is complete, so that half of one is never read.

The mark is written first, as not complete, and written again when everything else is on the disk. A folder without a mark is of an
older version or of another program, and is read as it is. `mupax/train/checkpoints/making.py` makes such folders.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax import __version__, disk, spellings
from mupax.errors import MupaxError

MARK = ".mupax-made.json"


class HalfMadeError(MupaxError):
    """A folder that no command has finished. The text names the command to write again."""


def write_mark(folder: Path, command: Sequence[str], names: Sequence[str] = (), *, complete: bool) -> None:
    """Write the mark of a folder, whole or not at all.

    Args:
        folder: exists, unless it is in a bucket.
        command: words of the command that makes the folder.
        names: entries of the folder that the command makes, which may be deleted while it is not complete.
        complete: whether everything else in the folder is on the disk.

    Raises:
        DiskError: the disk does not take it.
    """
    content = {"complete": complete, "command": shlex.join(command), "names": sorted(names), "version": __version__}
    disk.write_whole(folder / MARK, json.dumps(content, indent=2) + "\n")


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return what the mark of a folder says, or None if the folder has none.

    Raises:
        JsonError: the mark is damaged.
        DiskError: the disk cannot read it.
    """
    if disk.status(folder / MARK) is None:
        return None
    content = disk.read_json(folder / MARK)
    names = content.get("names")
    has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not has_names or not isinstance(content.get("complete"), bool) or not isinstance(content.get("command"), str):
        raise disk.JsonError(f"{folder / MARK}: not the mark of a folder; delete it if the folder is as it should be")
    # One that an earlier version began is finished by the same command, however it is spelled now.
    return {**content, "command": spellings.current(content["command"])}


def check_complete(folder: Path) -> None:
    """Refuse a folder that a command has not finished, before anything is read from it.

    Raises:
        HalfMadeError: the mark says so.
        JsonError, DiskError: the mark is damaged or cannot be read.
    """
    mark = read_mark(folder)
    if mark is not None and not mark["complete"]:
        raise HalfMadeError(
            f"{folder} is not complete: it was not finished by `{mark['command']}`; write that command again, or wait "
            "for it where it still runs"
        )
