"""The files below a folder of a user's data: hidden ones left out, linked folders followed once, refusals reported."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from mupax.disk import is_remote

_NO_DATA = {"__MACOSX", "__pycache__"}
"""Folders that other programs leave beside data: archives of macOS, bytecode of Python."""
_LISTED = 4


class Listing(NamedTuple):
    """The visible files of a folder, and the entries that could not be read."""

    files: list[tuple[str, Path]]
    """(path relative to the folder, with slashes; file), sorted by that path."""
    skipped: dict[str, str]
    """Relative path of each entry that was left out, and the reason. Hidden entries are not among them."""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is never data: `.git`, `.ipynb_checkpoints`, `__MACOSX`."""
    return name.startswith(".") or name in _NO_DATA


def files_below(folder: Path) -> Listing:
    """List every visible file below a folder, on this machine or in a bucket.

    A linked folder is read like any other, but every folder only once: a link to a folder that is read anyway, or to one
    that holds the link itself, is skipped with a reason.

    Args:
        folder: an existing folder. Hidden parts of its own path do not count.
    """
    if is_remote(folder):
        files = [
            (file.relative_to(folder).as_posix(), file)
            for file in folder.rglob("*")
            if file.is_file()
        ]
        visible = [(name, file) for name, file in files if not any(map(is_hidden, name.split("/")))]
        return Listing(sorted(visible), {})
    files: list[tuple[str, Path]] = []
    skipped: dict[str, str] = {}
    root = os.path.realpath(folder)
    visited = {root}

    def visit(place: Path, prefix: str, real: str) -> None:
        try:
            with os.scandir(place) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            skipped[prefix.rstrip("/") or "."] = f"cannot be read: {error.strerror}"
            return
        for entry in children:
            if is_hidden(entry.name):
                continue
            name = prefix + entry.name
            path = place / entry.name
            try:
                is_folder = entry.is_dir()
                is_file = entry.is_file()
            except OSError as error:
                skipped[name] = f"cannot be read: {error.strerror}"
                continue
            if is_folder:
                is_link = entry.is_symlink()
                target = os.path.realpath(path) if is_link else os.path.join(real, entry.name)
                reason = _reason_not_to_follow(target, root, visited) if is_link else None
                if target in visited and not is_link:  # by a link to this folder alone
                    reason = "is read already, by a link"
                if reason is not None:
                    skipped[name] = reason
                    continue
                visited.add(target)
                visit(path, f"{name}/", target)
            elif is_file:
                files.append((name, path))
            elif entry.is_symlink():
                skipped[name] = "is a link that leads nowhere"
            else:
                skipped[name] = "is neither a file nor a folder"

    visit(folder, "", root)
    return Listing(sorted(files), skipped)


def _reason_not_to_follow(target: str, root: str, visited: set[str]) -> str | None:
    """Return why the folder that a link leads to is not read, or `None` if it is."""
    folder = target
    while folder not in visited:
        if is_hidden(os.path.basename(folder)) or folder == os.path.dirname(folder):
            break  # nothing below a hidden folder is read otherwise
        folder = os.path.dirname(folder)
    if folder in visited:
        return "links to a folder that is read already"
    if root.startswith(target.rstrip(os.sep) + os.sep):
        return "links to a folder that holds this one"
    return None


def summary(skipped: dict[str, str]) -> list[str]:
    """Return a line per reason: how many entries were left out for it, and the first of their names."""
    counts = Counter(skipped.values())
    lines = []
    for reason, count in counts.most_common():
        names = [name for name, other in skipped.items() if other == reason]
        more = f" and {count - _LISTED} more" if count > _LISTED else ""
        entries = "entry" if count == 1 else "entries"
        lines.append(f"left out {count} {entries} ({reason}): {', '.join(names[:_LISTED])}{more}")
    return lines
