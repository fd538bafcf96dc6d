"""Split of a data set into training, validation and test part by names of files and folders."""

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
"""Part of a data set for each word that may stand in a name, such as "validation" for "dev".

Used for folders of images, files of text, files of records, and data sets of the hub.
"""


_ABOUT = ("readme", "license", "licence", "copying", "citation", "notice")
"""First words of the names of files that describe a data set and contain none of its data."""


class SplitNames(NamedTuple):
    """Names of a data set's files or folders, by the part of the data that each name stands for.

    Attributes:
        train: Names of the training part.
    """

    train: list[str]
    evaluation: list[str]
    """Names of the validation part, or of the test part if there is no validation part."""
    unused: list[str]
    """Names of the test part if there is a validation part."""

    def describe(self) -> str:
        """Return a line that says which splits of the data set are trained on, evaluated on, unused.

        A split is given by its name in the data set, such as "train" or "val".
        """
        line = f"training on {_listed(self.train)}, evaluating on {_listed(self.evaluation)}"
        if self.unused:
            line += f"; {_listed(self.unused)} is not used"
        return line


def split_word(name: str) -> str | None:
    """Return the word in a name that says which part of a data set it is, such as "val".

    The result is in lower case, and one of the keys of `WORDS`. It is `None` for a name without
    such a word, and for one that names two parts. Words are separated by `.`, `_`, `-` or a space:
    `wiki.train.tokens`, `val-00001.parquet` and `training_set` have a word. `trains` has none.
    `train_test.txt` names two parts.

    Args:
        name: Name of the file or folder, without the folders that contain it.
    """
    parts = re.split(r"[._\- ]+", name.lower())
    words = [part for part in parts if part in WORDS]
    if len({WORDS[word] for word in words}) != 1:
        return None
    return words[0]


def split_of(name: str) -> Split | None:
    """Return the part of a data set that a file or folder is by its name, or `None` if unknown."""
    word = split_word(name)
    return None if word is None else WORDS[word]


def by_name(names: Iterable[str], place: str) -> SplitNames | None:
    """Sort names of files or folders into the parts of a data set: train, validation and test.

    Returns `None` unless every name has a word for a part (`WORDS`), and there are names both for
    training and for validation or test.

    Args:
        names: Names of the top-level folders, or of the files if there are no folders.
        place: Path of the data set, for the message.

    Raises:
        DataError: Names have different words for the same part, such as `val` and `dev`.
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
            first_names, second_names = list(named.values())[:2]
            raise DataError(
                f"{place} has two {split} parts, {first_names[0]} and {second_names[0]}; "
                "move one of them out of it, or give them one name"
            )

    # Two words for one split raise an error above, so each split has at most one.
    parts = {}
    for split, named in words.items():
        parts[split] = next(iter(named.values()), [])
    if parts["validation"]:
        return SplitNames(parts["train"], parts["validation"], parts["test"])
    return SplitNames(parts["train"], parts["test"], [])


class FileSplit(NamedTuple):
    """Split of a folder's files by the names of the files or of their folders."""

    sides: dict[str, Literal["train", "eval"]]
    """Whether a file is for training or for evaluation, for each file that is used."""
    unused: list[str]
    """Files of the test part, if the validation part is used for evaluation."""
    outside: list[str]
    """Files that belong to no part, such as a README.md."""
    line: str
    """Line for the user: the names to train on, to evaluate on, and not used."""


def file_split(files: Iterable[str], place: str) -> FileSplit | None:
    """Split files by their names or the names of their folders. Return `None` if that fails.

    A name must contain a word for a part of the data (`WORDS`), such as `train` or `val`, and there
    must be names for training and for evaluation. Folders decide if every top-level folder has such
    a name. If there is a single top-level folder, such as `data`, the folders in it decide.
    Otherwise files decide if every file has such a name, except for a README, a licence and similar
    files.

    Args:
        files: Paths relative to the folder, with slashes.
        place: Path of the folder, for the message.

    Raises:
        DataError: Names have different words for the same part, such as `val` and `dev`.
    """
    all_files = sorted(files)
    data_files = [file for file in all_files if not _is_about(file)]
    candidates = data_files
    prefix = ""
    while candidates:
        # Name of the file or folder directly below `prefix` for each file.
        tops = {}
        for file in candidates:
            tops[file] = file.removeprefix(prefix).partition("/")[0]
        folders = {top for file, top in tops.items() if file != prefix + top}
        parts = by_name(folders, place)
        if parts is None and len(candidates) == len(data_files):
            # Files tell a split only if no data file is outside `prefix`.
            parts = by_name(set(tops.values()), place)
        if parts is not None:
            return _file_split(parts, tops, all_files, prefix)
        if len(folders) != 1:
            break
        prefix += f"{folders.pop()}/"
        candidates = [file for file in candidates if file.startswith(prefix)]

    names = {file: file.rpartition("/")[2] for file in data_files}
    parts = by_name(set(names.values()), place)
    if parts is None:
        return None
    return _file_split(parts, names, all_files, "")


def _is_about(file: str) -> bool:
    """Return whether a file only describes the data, by its name, such as README.md.

    A name that also names a part of the data, such as notice_train.txt, does not count.
    """
    name = file.rpartition("/")[2].lower()
    first_word = re.split(r"[._\- ]", name)[0]
    # A name such as notice_train.txt tells a part, so the file is data.
    return first_word in _ABOUT and split_word(name) is None


def _file_split(
    parts: SplitNames, names: dict[str, str], files: list[str], prefix: str
) -> FileSplit:
    """Return the split of some files, given the part of the data that each name stands for.

    Args:
        parts: Names of the training, the evaluation and the unused part.
        names: Name of the file, or of its folder, that decides, by file. A file that is not a key
            is outside the split.
        prefix: Folder that contains the names, for the line to the user. "" or "FOLDER/".
    """
    sides: dict[str, Literal["train", "eval"]] = {}
    unused = []
    outside = []
    for file in files:
        name = names.get(file)
        if name in parts.train:
            sides[file] = "train"
        elif name in parts.evaluation:
            sides[file] = "eval"
        elif name in parts.unused:
            unused.append(file)
        else:
            outside.append(file)
    paths = SplitNames(*([prefix + name for name in part] for part in parts))
    return FileSplit(sides, unused, outside, paths.describe())


def tells_some(files: Iterable[str]) -> bool:
    """Return whether file names look like an attempt to split by name that is incomplete.

    This is so if at least half of the files have a word for a part (`WORDS`) in their own name or
    in the name of their top-level folder, and the parts are training and at least one other. The
    user is then told why the names are not used.

    Args:
        files: Paths relative to the folder, with slashes.
    """
    num_files = 0
    splits = []
    for file in files:
        num_files += 1
        split = split_of(file.partition("/")[0]) or split_of(file.rpartition("/")[2])
        if split is not None:
            splits.append(split)
    return "train" in splits and len(set(splits)) > 1 and 2 * len(splits) >= num_files


def _listed(names: list[str]) -> str:
    """Return up to three names joined by "and", or the first name and the number of the others."""
    if len(names) <= 3:
        return " and ".join(names)
    return f"{names[0]} and {len(names) - 1} more"
