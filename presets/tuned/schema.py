"""What a tuned preset's file must have, entry by entry (`mupax.presets.tuned.find` says what each means), and reading such files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from mupax import disk
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import PRESETS, make
from mupax.presets.roles import AXES, PresetError
from mupax.presets.rule import FORMS

FORMAT = "tuned preset 1"
"""First entry of a file; another layout gets another number."""
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

SMALLEST, LARGEST = 1e-30, 1e30
"""Of numbers that are not 0: beyond, float32 has only 0 and infinity, or a product of two of them has."""
_MOST = 2**53
"""Of whole numbers."""

T = TypeVar("T")
Check = tuple[Callable[[Any], bool], str]


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that can be computed with."""
    return type(value) in (int, float) and (value == 0 or SMALLEST <= abs(value) <= LARGEST)


def _one_of(*names: str) -> Check:
    return (lambda v: v in names, f"one of {', '.join(names)}")


def _or_null(check: Check) -> Check:
    return (lambda v: v is None or check[0](v), f"{check[1]}, or null")


_TEXT: Check = (lambda v: isinstance(v, str) and bool(v), "a text")
_COUNT: Check = (lambda v: type(v) is int and 1 <= v <= _MOST, f"a whole number from 1 to {_MOST}")
_NUMBER: Check = (is_number, "a number")
_ABOVE: Check = (lambda v: is_number(v) and v > 0, "a number above 0")
_AT_LEAST: Check = (lambda v: is_number(v) and v >= 0, "a number of at least 0")
_FRACTION: Check = (lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1")
_OBJECT: Check = (lambda v: isinstance(v, dict), "an object")
_LIST: Check = (lambda v: isinstance(v, list), "a list")
_SIZES: Check = (
    lambda v: (
        isinstance(v, dict) and bool(v) and all(a in AXES and _COUNT[0](n) for a, n in v.items())
    ),
    f"logical axes ({', '.join(AXES)}) with whole numbers from 1 to {_MOST}",
)
_BOUNDS = {"low": _or_null(_NUMBER), "high": _or_null(_NUMBER)}

_SCHEMA: dict[str, Any] = {
    "format": (lambda v: v == FORMAT, repr(FORMAT)),
    "name": (
        lambda v: isinstance(v, str) and bool(NAME.fullmatch(v)),
        "small letters, digits and single hyphens",
    ),
    "preset": (
        lambda v: isinstance(v, str) and v in PRESETS,
        f"one of {', '.join(PRESETS)}, or a preset of your own that --plugin MODULE imports",
    ),
    "constants": _OBJECT,
    "form": _or_null(_one_of(*FORMS)),
    "base": _or_null(_SIZES),
    "optimizer": {
        "name": (
            lambda v: isinstance(v, str) and v in OPTIMIZERS,
            f"one of {', '.join(OPTIMIZERS)}, or an optimizer of your own that --plugin MODULE imports",
        ),
        "peak_lr": _ABOVE,
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
        "log2_lr": (
            lambda v: isinstance(v, list) and len(v) >= 3 and all(map(is_number, v)),
            "a list of numbers",
        ),
        "loss": [(_or_null(_NUMBER)[0], "a number, or null where a seed diverged")],
        "log2_optimum": {"value": _NUMBER, **_BOUNDS},
        "transfer": [
            {
                "axis": _TEXT,
                "sizes": (
                    lambda v: isinstance(v, list) and len(v) >= 2 and all(map(_COUNT[0], v)),
                    "whole numbers, two or more",
                ),
                "verdict": _one_of("transfers", "drifts", "undecided"),
                "drift": {"value": _or_null(_NUMBER), **_BOUNDS},
            }
        ],
        "versions": (
            lambda v: isinstance(v, dict) and all(isinstance(x, str) for x in v.values()),
            "an object of texts",
        ),
        "judged": _one_of("training", "evaluation"),
        "command": _TEXT,
        "date": (
            lambda v: isinstance(v, str) and bool(re.fullmatch(r"\d{4}-\d\d-\d\d", v)),
            "YYYY-MM-DD",
        ),
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
            "winner_less_start": {"value": _or_null(_NUMBER), **_BOUNDS},
        },
    },
}
"""Entry to what fits and what it must be; to entries of its own; or, in brackets, to that of every entry of a list."""
_OPTIONAL = ("search", "judged")
"""Entries that a file may leave out."""

_NUMBERS: Check = (
    lambda v: (
        isinstance(v, dict)
        and all(_or_null(_AT_LEAST)[0](v.get(column)) for column in _COLUMNS)
        and len(v) == 5
    ),
    "std, lr, wd, eps and multiplier, each a number of at least 0, or null",
)
_COLUMNS = ("std", "lr", "wd", "eps", "multiplier")
_PUBLISHED: dict[str, Any] = {
    **_SCHEMA,
    "provenance": {
        "evidence": _one_of("published"),
        "status": _one_of("verified", "reported"),
        "source": {
            "name": _TEXT,
            "repository": _TEXT,
            "commit": (
                lambda v: isinstance(v, str) and bool(re.fullmatch(r"[0-9a-f]{40}", v)),
                "a commit of 40 digits",
            ),
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
                "groups": (
                    lambda v: isinstance(v, dict) and bool(v) and all(map(_NUMBERS[0], v.values())),
                    f"groups, each with {_NUMBERS[1]}",
                ),
            }
        ],
        "differs": [_TEXT],
        "unknown": [_TEXT],
        "date": _SCHEMA["provenance"]["date"],
    },
}
"""Entries of a preset whose numbers others have published. Of the optimizer it has what the source says."""
_PUBLISHED_OPTIONAL = tuple(
    name for name in _SCHEMA["optimizer"] if name not in ("name", "peak_lr")
)


def checked(contents: Any) -> dict[str, Any]:
    """A file's contents, as JSON has them, where they are a tuned preset's.

    Raises:
        PresetError: an entry is missing, unknown or not what it must be; names the entry and says what it must be.
    """
    is_published = is_of_others(contents)
    if is_published:
        _check("", contents, _PUBLISHED, _PUBLISHED_OPTIONAL)
    else:
        _check("", contents, _SCHEMA, _OPTIONAL)
    make(contents["preset"], contents["constants"])
    study = contents["provenance"]
    if not study["sizes"]:
        raise PresetError("provenance.sizes is []; it must be a list of the sizes of every model")
    if is_published:
        return contents
    if len(study["loss"]) != (points := len(study["log2_lr"])):
        raise PresetError(
            f"provenance.loss has {len(study['loss'])} entries; it must be as many as log2_lr, which has {points}"
        )
    return contents


def is_of_others(contents: Any) -> bool:
    """Return whether a file's contents say that others have published them."""
    study = contents.get("provenance") if isinstance(contents, dict) else None
    return isinstance(study, dict) and study.get("evidence") == "published"


def load(path: str | Path, parse: Callable[[Any], T], missing: str) -> T:
    """What a JSON file holds.

    Args:
        path: of the file, for messages too.
        parse: makes it from the contents.
        missing: what to say where there is no such file, with {error} in it.

    Raises:
        PresetError: there is no such file, or `parse` refuses it; names file and entry.
        DiskError: the disk cannot read it.
    """
    try:
        return parse(disk.read_json(Path(path)))
    except PresetError as error:
        raise PresetError(f"{path}: {error}") from error
    except disk.JsonError as error:
        text = str(error).removeprefix(f"{path}: ")
        raise PresetError(f"{path}: {missing.format(error=text)}") from error


def same_keys(where: str, keys: Iterable[str], names: Collection[str]) -> None:
    """Raises PresetError where the keys of an object are not those that it must have.

    Args:
        where: begins the message.
        keys: of the object.
        names: those it must have, in the order of the message.
    """
    missing, unknown = sorted(set(names) - set(keys)), sorted(set(keys) - set(names))
    if missing or unknown:
        raise PresetError(
            f"{where} must have {', '.join(names)}; missing {missing}, unknown {unknown}"
        )


def _check(where: str, value: Any, schema: Any, optional: Collection[str]) -> None:
    fits, kind = (
        _OBJECT if isinstance(schema, dict) else _LIST if isinstance(schema, list) else schema
    )
    if not fits(value):
        raise PresetError(f"{where or 'the file'} is {value!r:.60}; it must be {kind}")
    if isinstance(schema, list):
        for entry in value:
            _check(where, entry, schema[0], optional)
    elif isinstance(schema, dict):
        schema = {
            name: inner for name, inner in schema.items() if name in value or name not in optional
        }
        same_keys(where or "the file", value, schema)
        for name, inner in schema.items():
            _check(f"{where}.{name}".strip("."), value[name], inner, optional)
