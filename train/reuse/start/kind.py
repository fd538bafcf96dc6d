"""The word before FOLDER in `finetune vit FOLDER --from SOURCE`: which family the source is to be of."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from mupax.command_line import UsageError
from mupax.zoo.configs import ModelConfig

FAMILIES = {"vit": "vit", "lm": "decoder", "ed": "encoder-decoder"}
"""How names of recipes begin, to the family that they are of."""
_DATA = {
    "vit": "give one that has a folder of images per class",
    "lm": "give a file or folder of text or records",
    "ed": "give a file or folder of text or records",
    None: "give one that has a folder of images per class, or text",
}


def split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The kind that stands first, where there is one and FOLDER behind it, and the other words.

    A lone `vit` is a folder of that name.
    """
    if len(argv) > 1 and argv[0] in FAMILIES and not argv[1].startswith("-"):
        return argv[0], [*argv[1:]]
    return None, [*argv]


def check_folder(kind: str | None, folder: Path, rest: Sequence[str]) -> None:
    """Raises UsageError where the folder is not there, or a word stands behind it.

    Args:
        kind: of the line; None where it says none.
        folder: as it was read.
        rest: the words that are none of the command's flags.
    """
    if rest and not rest[0].startswith("-"):
        near = difflib.get_close_matches(str(folder), FAMILIES, n=1)
        if kind is None and near:
            hint = f"did you mean finetune {near[0]} {rest[0]}?"
        else:
            hint = f"write finetune FOLDER, or {', '.join(FAMILIES)} as the first word and then FOLDER"
        raise UsageError(f"finetune has two words, {folder} and {rest[0]}, and takes one folder; {hint}")
    if not folder.exists():
        raise UsageError(f"no {'folder' if kind in ('vit', None) else 'file or folder'} {folder}; {_DATA[kind]}")


def check_source(kind: str | None, model: ModelConfig, source: Path) -> None:
    """Raises UsageError where the source is of another family than the line says.

    Args:
        kind: of the line; None where it says none.
        model: of the source.
        source: where it is.
    """
    if kind is None or model.family == FAMILIES[kind]:
        return
    other = next((word for word, family in FAMILIES.items() if family == model.family), None)
    write = f"write finetune {other} in its place, or" if other else "write"
    raise UsageError(
        f"finetune {kind} is for the family {FAMILIES[kind]}, and {source} holds a {model.family}; {write} no word before the folder"
    )
