"""Names of files and folders that say which part of a data set they hold: training, validation or test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from mupax.train.data.interface import DataError

Split = Literal["train", "validation", "test"]

WORDS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "trn": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
    "holdout": "test",
}
"""The one list of names of a split. It serves folders of images, files of text and records, and data sets of the hub."""


_ABOUT = ("readme", "license", "licence", "copying", "citation", "notice")
"""Beginnings of the names of files that tell about data and hold none."""


class SplitNames(NamedTuple):
    """The parts of a data set by the names that its files or folders carry."""

    train: list[str]
    evaluation: list[str]
    """Names of the validation part; of the test part where there is no validation part."""
    unused: list[str]
    """Names of the test part, where a validation part is there too."""

    def describe(self) -> str:
        """Return a line for the user: which names are trained on, evaluated on and not used."""
        line = f"training on {_listed(self.train)}, evaluating on {_listed(self.evaluation)}"
        if self.unused:
            line += f"; {_listed(self.unused)} is not used"
        return line


def split_word(name: str) -> str | None:
    """Return the word of `WORDS` that a file or folder name carries, in lower case.

    A word stands between the ends of the name and `.`, `_`, `-` or a space: `wiki.train.tokens`, `val-00001.parquet` and
    `training_set` carry one. `trains` carries none, and neither does `train_test.txt`, which names two parts.

    Args:
        name: without its folders.
    """
    parts = re.split(r"[._\- ]+", name.lower())
    words = [part for part in parts if part in WORDS]
    if len({WORDS[word] for word in words}) != 1:
        return None
    return words[0]


def split_of(name: str) -> Split | None:
    """Return the part of a data set that a file or folder name says it holds."""
    word = split_word(name)
    return None if word is None else WORDS[word]


def by_name(names: Iterable[str], place: str) -> SplitNames | None:
    """Return the parts of a data set, if every name carries one and both training and evaluation are among them.

    Args:
        names: of the top-level folders, or of the files where there are no folders.
        place: of the data set, for the message.

    Raises:
        DataError: the same part has two names, such as `val` and `dev`, so that which one is meant is unknown.
    """
    words: dict[Split, dict[str, list[str]]] = {"train": {}, "validation": {}, "test": {}}
    for name in sorted(names):
        word = split_word(name)
        if word is None:
            return None
        words[WORDS[word]].setdefault(word, []).append(name)
    if not words["train"] or not (words["validation"] or words["test"]):
        return None
    for split, named in words.items():
        if len(named) > 1:
            (first, *_), (second, *_) = list(named.values())[:2]
            raise DataError(
                f"{place} has two {split} parts, {first} and {second}; move one of them out of it, or give them one name"
            )
    parts = {
        split: [name for files in named.values() for name in files]
        for split, named in words.items()
    }
    if parts["validation"]:
        return SplitNames(parts["train"], parts["validation"], parts["test"])
    return SplitNames(parts["train"], parts["test"], [])


class FileSplit(NamedTuple):
    """The split of a folder's files by the names that they or their folders carry."""

    sides: dict[str, Literal["train", "eval"]]
    """Side of each file that is used."""
    unused: list[str]
    """Files of the test part, where a validation part is there too."""
    outside: list[str]
    """Files beside the split, such as a README.md."""
    line: str
    """What is trained on, evaluated on and not used, for the user."""


def file_split(files: Iterable[str], place: str) -> FileSplit | None:
    """Return the split that names tell, or `None` if they tell none.

    Folders tell it if every top-level folder carries a name of a part, and files if every file does but a README, a licence
    and the like. A single top-level folder that holds everything else, such as `data`, is looked into.

    Args:
        files: paths within the folder, with slashes.
        place: of the folder, for the message.

    Raises:
        DataError: the same part has two names.
    """
    every = sorted(files)
    data_files = [file for file in every if not _is_about(file)]
    inside = data_files
    prefix = ""
    while inside:
        tops = {file: file.removeprefix(prefix).partition("/")[0] for file in inside}
        folders = {top for file, top in tops.items() if file != prefix + top}
        parts = by_name(folders, place)
        if parts is None and len(inside) == len(data_files):  # a split of files has none beside it
            parts = by_name(set(tops.values()), place)
        if parts is not None:
            return _file_split(parts, tops, every, prefix)
        if len(folders) != 1:
            break
        prefix += f"{folders.pop()}/"
        inside = [file for file in inside if file.startswith(prefix)]
    names = {file: file.rpartition("/")[2] for file in data_files}
    parts = by_name(set(names.values()), place)
    return None if parts is None else _file_split(parts, names, every, "")


def _is_about(file: str) -> bool:
    """Return whether a file tells about data, by its name: README.md, LICENSE.txt."""
    name = file.rpartition("/")[2].lower()
    return re.split(r"[._\- ]", name)[0] in _ABOUT and split_word(name) is None


def _file_split(
    parts: SplitNames, names: dict[str, str], every: list[str], prefix: str
) -> FileSplit:
    """Return the split of files from the parts of their names.

    Args:
        parts: names by part.
        names: the name that tells each file's part; other files stand beside the split.
        every: all files.
        prefix: folder that the names are in, for the user.
    """
    sides: dict[str, Literal["train", "eval"]] = {}
    unused = []
    outside = []
    for file in every:
        name = names.get(file)
        if name in parts.train:
            sides[file] = "train"
        elif name in parts.evaluation:
            sides[file] = "eval"
        elif name in parts.unused:
            unused.append(file)
        else:
            outside.append(file)
    shown = SplitNames(*([prefix + name for name in part] for part in parts))
    return FileSplit(sides, unused, outside, shown.describe())


def tells_some(files: Iterable[str]) -> bool:
    """Return whether most names look like a split, training and evaluation among them, though some tell no part."""
    splits = [
        split_of(file.partition("/")[0]) or split_of(file.rpartition("/")[2]) for file in files
    ]
    told = [split for split in splits if split is not None]
    return "train" in told and len(set(told)) > 1 and 2 * len(told) >= len(splits)


def _listed(names: list[str]) -> str:
    if len(names) <= 3:
        return " and ".join(names)
    return f"{names[0]} and {len(names) - 1} more"
