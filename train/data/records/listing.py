"""List of the files below a folder of a user's data, and of the files and folders left out."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from mupax.disk import is_remote
from mupax.train.data.interface import ReadError, may_pass

_NO_DATA = {"__MACOSX", "__pycache__"}
"""Folders that other programs add to data: archives of macOS, bytecode of Python."""
_LISTED = 4


class Listing(NamedTuple):
    """Visible files below a folder, and the files, folders and links that are left out."""

    files: list[tuple[str, Path]]
    """Pairs of the path relative to the folder, with slashes, and the file, sorted by path."""
    skipped: dict[str, str]
    """Reason why a file, folder or link is left out, by relative path.

    A reason is the rest of a sentence, such as "is a link that leads nowhere". Hidden entries are
    not listed.
    """


def is_hidden(name: str) -> bool:
    """Return whether files and folders of this name are never data, such as `.git`, `__MACOSX`."""
    return name.startswith(".") or name in _NO_DATA


def files_below(folder: Path) -> Listing:
    """List every visible file below a folder, on this machine or in a bucket.

    Links to folders are followed, but no folder is read twice. A link to a folder that is read
    anyway, or to a folder that contains `folder`, is left out with a reason.

    Args:
        folder: Existing folder. Its own path may have hidden parts.

    Raises:
        ReadError: The disk does not answer.
    """
    if is_remote(folder):
        return Listing(_remote_files(folder), {})
    walk = _Walk(os.path.realpath(folder))
    walk.visit(folder, "", walk.root)
    return Listing(sorted(walk.files), walk.skipped)


def _remote_files(folder: Path) -> list[tuple[str, Path]]:
    """Return relative path and file of every visible file below a folder in a bucket, sorted."""
    files = []
    for file in folder.rglob("*"):
        name = file.relative_to(folder).as_posix()
        is_visible = not any(is_hidden(part) for part in name.split("/"))
        if file.is_file() and is_visible:
            files.append((name, file))
    return sorted(files)


class _Walk:
    """Walk through a folder on this machine that collects files and skipped entries."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files: list[tuple[str, Path]] = []
        self.skipped: dict[str, str] = {}
        self._visited = {root}

    def visit(self, folder: Path, prefix: str, real_path: str) -> None:
        """Add the files below a folder to `files`, and what is left out to `skipped`.

        Hidden entries are ignored. Entries are visited in the order of their names.

        Args:
            folder: Folder below the root, or the root.
            prefix: Relative path of the folder with a slash at its end. "" for the root.
            real_path: Absolute path of the folder with all links resolved.
        """
        try:
            with os.scandir(folder) as entries:
                # Sorted, so that of several links to one folder every machine follows the same one.
                children = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._skip(prefix.rstrip("/") or ".", folder, error)
            return
        for entry in children:
            if is_hidden(entry.name):
                continue
            name = prefix + entry.name
            path = folder / entry.name
            try:
                is_folder = entry.is_dir()
                is_file = entry.is_file()
            except OSError as error:
                self._skip(name, path, error)
                continue
            if is_folder:
                self._visit_subfolder(entry, name, path, real_path)
            elif is_file:
                self.files.append((name, path))
            elif entry.is_symlink():
                self.skipped[name] = "is a link that leads nowhere"
            else:
                self.skipped[name] = "is neither a file nor a folder"

    def _skip(self, name: str, path: Path, error: OSError) -> None:
        """Add a file or folder that may not be read to `skipped`, under its name.

        Raises:
            ReadError: The disk does not answer. The run would train on other data without the path.
        """
        reason = f"cannot be read: {error.strerror}"
        if may_pass(error):
            raise ReadError(f"{path} {reason}") from error
        self.skipped[name] = reason

    def _visit_subfolder(
        self, entry: os.DirEntry[str], name: str, path: Path, parent_path: str
    ) -> None:
        """Visit a folder or a link to a folder, or add it to `skipped` with the reason not to.

        Args:
            entry: Directory entry of the folder or link.
            name: Path of the folder relative to the root, with slashes.
            path: Path at which the folder is opened.
            parent_path: Absolute path of the containing folder with all links resolved.
        """
        if entry.is_symlink():
            target = os.path.realpath(path)
            reason = _reason_not_to_follow(target, self.root, self._visited)
        else:
            target = os.path.join(parent_path, entry.name)
            # Only a link can have led to this folder before.
            reason = "is read already, by a link" if target in self._visited else None
        if reason is not None:
            self.skipped[name] = reason
            return
        self._visited.add(target)
        self.visit(path, f"{name}/", target)


def _reason_not_to_follow(target: str, root: str, visited: set[str]) -> str | None:
    """Return the reason not to read a folder that a link leads to, or `None` to read it.

    All paths are absolute, with all links resolved.

    Args:
        target: Path of the folder that the link leads to.
        root: Path of the folder whose files are listed.
        visited: Paths of the folders that were read or are being read.
    """
    folder = target
    while folder not in visited:
        if is_hidden(os.path.basename(folder)) or folder == os.path.dirname(folder):
            break  # folders below a hidden folder are not read without the link
        folder = os.path.dirname(folder)
    if folder in visited:
        return "links to a folder that is read already"
    if root.startswith(target.rstrip(os.sep) + os.sep):
        return "links to a folder that holds this one"
    return None


def summary(skipped: dict[str, str]) -> list[str]:
    """Return lines for the user, one for each reason why entries were left out.

    A line has the number of entries and the names of the first four.

    Args:
        skipped: Reason for each entry, by relative path (`Listing`).
    """
    counts = Counter(skipped.values())
    lines = []
    for reason, count in counts.most_common():
        names = []
        for name, entry_reason in skipped.items():
            if entry_reason == reason:
                names.append(name)
        remainder = f" and {count - _LISTED} more" if count > _LISTED else ""
        entries = "entry" if count == 1 else "entries"
        listed = ", ".join(names[:_LISTED])
        lines.append(f"left out {count} {entries} ({reason}): {listed}{remainder}")
    return lines
