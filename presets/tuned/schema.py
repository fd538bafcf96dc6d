"""Schema of a tuned preset's file, and the reader of such files.

`mupax.presets.tuned.find` and `mupax.presets.tuned.published` say what each entry means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mupax import disk
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import PRESETS
from mupax.presets.papers.choices import make
from mupax.presets.roles import AXES, PresetError
from mupax.presets.rule import FORMS

FORMAT = "tuned preset 1"
"""Value of the entry "format" in a tuned preset's file. Another layout gets another number."""
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""Pattern of a tuned preset's name."""

SMALLEST = 1e-30
"""Smallest absolute value of a number other than 0. Products of smaller ones are 0 in float32."""
LARGEST = 1e30
"""Largest absolute value of a number. Products of larger ones are infinite in float32."""
_LARGEST_INTEGER = 2**53

T = TypeVar("T")


class Check(NamedTuple):
    """Condition on a value of JSON.

    Attributes:
        fits: Function that returns whether a value fulfills the condition.
        expected: Description of such values, for the message "it must be ...".
    """

    fits: Callable[[Any], bool]
    expected: str


def is_number(value: Any) -> bool:
    """Return whether a JSON value is 0 or a number of absolute value `SMALLEST` to `LARGEST`."""
    # A bool is an int, but no number in JSON.
    if type(value) not in (int, float):
        return False
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST_INTEGER


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(axis in AXES and _is_count(size) for axis, size in value.items())


def _is_grown_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= 2 and all(map(_is_count, value))


def _is_curve(value: Any) -> bool:
    # An optimum needs a point on each side.
    return isinstance(value, list) and len(value) >= 3 and all(map(is_number, value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_group(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    has_numbers = all(_AT_LEAST_OR_NULL.fits(value.get(column)) for column in _COLUMNS)
    return has_numbers and len(value) == len(_COLUMNS)


def _is_groups(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_group, value.values()))


def _one_of(*names: str) -> Check:
    return Check(lambda value: value in names, f"one of {', '.join(names)}")


def _or_null(check: Check) -> Check:
    return Check(lambda value: value is None or check.fits(value), f"{check.expected}, or null")


def _key_of(table: Collection[str], kind: str) -> Check:
    """Return a check that a value is a key of `table`. Its message also mentions plugins.

    Args:
        table: Names that are allowed, such as those of presets.
        kind: Noun with an article for what a plugin may add, such as "a preset".
    """
    return Check(
        lambda value: isinstance(value, str) and value in table,
        f"one of {', '.join(table)}, or {kind} of your own that --plugin MODULE imports",
    )


def _matching(pattern: re.Pattern[str], expected: str) -> Check:
    return Check(lambda value: isinstance(value, str) and bool(pattern.fullmatch(value)), expected)


_TEXT = Check(_is_text, "a text")
_COUNT = Check(_is_count, f"a whole number from 1 to {_LARGEST_INTEGER}")
_NUMBER = Check(is_number, "a number")
_ABOVE = Check(lambda value: is_number(value) and value > 0, "a number above 0")
_AT_LEAST = Check(lambda value: is_number(value) and value >= 0, "a number of at least 0")
_FRACTION = Check(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_OBJECT = Check(lambda value: isinstance(value, dict), "an object")
_LIST = Check(lambda value: isinstance(value, list), "a list")
_SIZES = Check(
    _is_sizes,
    f"logical axes ({', '.join(AXES)}) with whole numbers from 1 to {_LARGEST_INTEGER}",
)
_DATE = _matching(re.compile(r"\d{4}-\d\d-\d\d"), "YYYY-MM-DD")
_COMMIT = _matching(re.compile(r"[0-9a-f]{40}"), "a commit of 40 digits")
_NUMBER_OR_NULL = _or_null(_NUMBER)
_AT_LEAST_OR_NULL = _or_null(_AT_LEAST)
_BOUNDS = {"low": _NUMBER_OR_NULL, "high": _NUMBER_OR_NULL}

_SCHEMA: dict[str, Any] = {
    "format": Check(lambda value: value == FORMAT, repr(FORMAT)),
    "name": _matching(NAME, "small letters, digits and single hyphens"),
    "preset": _key_of(PRESETS, "a preset"),
    "constants": _OBJECT,
    "form": _or_null(_one_of(*FORMS)),
    "base": _or_null(_SIZES),
    "optimizer": {
        "name": _key_of(OPTIMIZERS, "an optimizer"),
        "peak_lr": _ABOVE,
        "adam_lr": _ABOVE,
        "orthogonalizer": _one_of("newton_schulz", "polar_express"),
        "b1": _FRACTION,
        "b2": _FRACTION,
        "eps": _AT_LEAST,
        "weight_decay": _AT_LEAST,
        "decay": _one_of("coupled", "independent"),
        "momentum": _FRACTION,
        "clip_norm": _or_null(_ABOVE),
        "schedule": _one_of("constant", "cosine", "linear", "wsd"),
        "warmup_fraction": _FRACTION,
        "final_lr_fraction": _AT_LEAST,
    },
    "provenance": {
        "recipe": _TEXT,
        "data": _TEXT,
        "unit": _one_of("token", "image"),
        "seen": _COUNT,
        "steps": _COUNT,
        "batch": _COUNT,
        "sizes": [_SIZES],
        "seeds": _COUNT,
        "log2_lr": Check(_is_curve, "a list of numbers"),
        "loss": [Check(_NUMBER_OR_NULL.fits, "a number, or null where a seed diverged")],
        "log2_optimum": {"value": _NUMBER, **_BOUNDS},
        "transfer": [
            {
                "axis": _TEXT,
                "sizes": Check(_is_grown_sizes, "whole numbers, two or more"),
                "verdict": _one_of("transfers", "drifts", "undecided"),
                "drift": {"value": _NUMBER_OR_NULL, **_BOUNDS},
            }
        ],
        "versions": Check(_is_texts, "an object of texts"),
        "judged": _one_of("training", "evaluation"),
        "command": _TEXT,
        "date": _DATE,
        "search": {
            "constants": [
                {
                    "word": _TEXT,
                    "flag": _TEXT,
                    "low": _ABOVE,
                    "high": _ABOVE,
                    "start": _AT_LEAST,
                    "winner": _AT_LEAST,
                    "importance": _FRACTION,
                }
            ],
            "runs": _COUNT,
            "minutes": _ABOVE,
            "train_seconds": _AT_LEAST,
            "fresh_seeds": _AT_LEAST,
            "winner_less_start": {"value": _NUMBER_OR_NULL, **_BOUNDS},
        },
    },
}
"""Schema of a tuned preset's file: for each entry a `Check`, or a nested schema for an object.

A list in the schema holds the schema of each of its items.
"""
_OPTIONAL = ("search", "judged", "adam_lr", "orthogonalizer")
"""Entries that the file of a tuned preset may leave out."""

_COLUMNS = ("std", "lr", "wd", "eps", "multiplier")
_GROUP = "std, lr, wd, eps and multiplier, each a number of at least 0, or null"
_PUBLISHED: dict[str, Any] = {
    **_SCHEMA,
    "provenance": {
        "evidence": _one_of("published"),
        "status": _one_of("verified", "reported"),
        "source": {
            "name": _TEXT,
            "repository": _TEXT,
            "commit": _COMMIT,
            "files": [_TEXT],
        },
        "data": _TEXT,
        "unit": _one_of("token", "image"),
        "seen": _or_null(_COUNT),
        "steps": _or_null(_COUNT),
        "batch": _or_null(_COUNT),
        "sizes": [_SIZES],
        "tables": [
            {
                "model": _TEXT,
                "where": _TEXT,
                "sizes": _SIZES,
                "logits": _ABOVE,
                "branch": _ABOVE,
                "tied_readout": _or_null(_ABOVE),
                "groups": Check(_is_groups, f"groups, each with {_GROUP}"),
            }
        ],
        "differs": [_TEXT],
        "unknown": [_TEXT],
        "date": _DATE,
    },
}
"""Schema of a tuned preset whose values others have published."""
_PUBLISHED_OPTIONAL = tuple(
    name for name in _SCHEMA["optimizer"] if name not in ("name", "peak_lr")
)
"""Optimizer settings that a source may leave open."""


def checked(contents: Any) -> dict[str, Any]:
    """Return the contents of a tuned preset's file, after checking every entry.

    Raises:
        PresetError: An entry is missing, unknown or invalid, or the preset has no such constant.
            The message names the entry and says what it must be.
    """
    is_published = is_of_others(contents)
    if is_published:
        _check("", contents, _PUBLISHED, _PUBLISHED_OPTIONAL)
    else:
        _check("", contents, _SCHEMA, _OPTIONAL)

    # Called for its errors: it refuses constants that the preset does not have.
    make(contents["preset"], contents["constants"])
    study = contents["provenance"]
    if not study["sizes"]:
        raise PresetError("provenance.sizes is []; it must be a list of the sizes of every model")
    if is_published:
        return contents
    num_losses = len(study["loss"])
    num_rates = len(study["log2_lr"])
    if num_losses != num_rates:
        raise PresetError(
            f"provenance.loss has {num_losses} entries; "
            f"it must be as many as log2_lr, which has {num_rates}"
        )
    return contents


def is_of_others(contents: Any) -> bool:
    """Return whether a tuned preset's file says that others have published the values."""
    if not isinstance(contents, dict):
        return False
    study = contents.get("provenance")
    return isinstance(study, dict) and study.get("evidence") == "published"


def load(path: str | Path, parse: Callable[[Any], T], missing: str) -> T:
    """Read a JSON file and return its contents, converted by `parse`.

    Args:
        path: Path of the file, which messages name.
        parse: Function from the JSON contents to the result. It may raise `PresetError`.
        missing: Message if the file cannot be read as JSON. `{error}` in it stands for the reason.

    Raises:
        PresetError: The file is missing or no JSON, or `parse` refuses the contents.
        DiskError: The disk cannot read the file.
    """
    try:
        return parse(disk.read_json(Path(path)))
    except PresetError as error:
        raise PresetError(f"{path}: {error}") from error
    except disk.JsonError as error:
        # The error's text begins with the path, which the new message has already.
        text = str(error).removeprefix(f"{path}: ")
        raise PresetError(f"{path}: {missing.format(error=text)}") from error


def same_keys(where: str, keys: Iterable[str], names: Collection[str]) -> None:
    """Raise `PresetError` if an object has other keys than `names`.

    Args:
        where: Name of the object, with which the message begins.
        names: Keys that the object must have, in the order of the message.
    """
    missing = sorted(set(names) - set(keys))
    unknown = sorted(set(keys) - set(names))
    if missing or unknown:
        raise PresetError(
            f"{where} must have {', '.join(names)}; missing {missing}, unknown {unknown}"
        )


def _check(path: str, value: Any, schema: Any, optional: Collection[str]) -> None:
    """Raise `PresetError` if a JSON value does not fit its schema.

    Args:
        path: Keys from the top of the file to the value, joined by dots. Empty for the file itself.
        schema: `_SCHEMA`, `_PUBLISHED` or a part of them.
        optional: Names of entries that may be missing, at any depth.
    """
    if isinstance(schema, dict):
        check = _OBJECT
    elif isinstance(schema, list):
        check = _LIST
    else:
        check = schema
    if not check.fits(value):
        name = path or "the file"
        raise PresetError(f"{name} is {value!r:.60}; it must be {check.expected}")

    if isinstance(schema, list):
        for item in value:
            _check(path, item, schema[0], optional)
    elif isinstance(schema, dict):
        entries = {}
        for name, entry_schema in schema.items():
            # An optional entry that is missing leaves the schema, so that all others stay required.
            if name in value or name not in optional:
                entries[name] = entry_schema
        same_keys(path or "the file", value, entries)
        for name, entry_schema in entries.items():
            _check(f"{path}.{name}".strip("."), value[name], entry_schema, optional)
