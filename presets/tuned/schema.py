"""What a tuned preset's file must have, entry by entry (`mupax.presets.tuned.find` says what each means), and reading such files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mupax.presets import constants as constants_of
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import PRESETS
from mupax.presets.roles import AXES, PresetError
from mupax.presets.rule import FORMS

FORMAT = "tuned preset 1"
"""First entry of a file; another layout gets another number."""
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

T = TypeVar("T")
Check = tuple[Callable[[Any], bool], str]

_TEXT: Check = (lambda v: isinstance(v, str) and bool(v), "a text")
_COUNT: Check = (lambda v: type(v) is int and v >= 1, "a whole number of at least 1")
_ABOVE: Check = (lambda v: _is_number(v) and v > 0, "a number above 0")
_AT_LEAST: Check = (lambda v: _is_number(v) and v >= 0, "a number of at least 0")
_FRACTION: Check = (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1")
_NUMBER: Check = (lambda v: _is_number(v), "a number")
_NUMBERS: Check = (lambda v: isinstance(v, list) and len(v) >= 3 and all(map(_is_number, v)), "a list of numbers")
_LOSSES: Check = (
    lambda v: isinstance(v, list) and all(x is None or _is_number(x) for x in v),
    "a list of numbers, null where a seed diverged",
)
_OBJECT: Check = (lambda v: isinstance(v, dict), "an object")
_SIZES: Check = (
    lambda v: isinstance(v, dict) and bool(v) and all(a in AXES and type(n) is int and n >= 1 for a, n in v.items()),
    f"logical axes ({', '.join(AXES)}) with whole numbers of at least 1",
)
_TEXTS: Check = (lambda v: isinstance(v, dict) and all(isinstance(x, str) for x in v.values()), "an object of texts")
_LISTED: Check = (lambda v: isinstance(v, list), "a list")


def _one_of(*names: str) -> Check:
    return (lambda v: v in names, f"one of {', '.join(names)}")


def _or_null(check: Check) -> Check:
    return (lambda v: v is None or check[0](v), f"{check[1]}, or null")


_SCHEMA: dict[str, Check] = {
    "format": (lambda v: v == FORMAT, repr(FORMAT)),
    "name": (lambda v: isinstance(v, str) and bool(NAME.fullmatch(v)), "small letters, digits and single hyphens"),
    "preset": _TEXT,
    "constants": _OBJECT,
    "form": _or_null(_one_of(*FORMS)),
    "base": _or_null(_SIZES),
    "optimizer": _OBJECT,
    "provenance": _OBJECT,
}
_OPTIMIZER: dict[str, Check] = {
    "name": _one_of(*OPTIMIZERS),
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
}
_PROVENANCE: dict[str, Check] = {
    "recipe": _TEXT,
    "data": _TEXT,
    "unit": _one_of("token", "image"),
    "seen": _COUNT,
    "steps": _COUNT,
    "batch": _COUNT,
    "sizes": _LISTED,
    "seeds": _COUNT,
    "log2_lr": _NUMBERS,
    "loss": _LOSSES,
    "log2_optimum": _OBJECT,
    "transfer": _LISTED,
    "versions": _TEXTS,
    "command": _TEXT,
    "date": (lambda v: isinstance(v, str) and bool(re.fullmatch(r"\d{4}-\d\d-\d\d", v)), "YYYY-MM-DD"),
}
_INTERVAL: dict[str, Check] = {"value": _NUMBER, "low": _or_null(_NUMBER), "high": _or_null(_NUMBER)}
_GROWN: dict[str, Check] = {
    "axis": _TEXT,
    "sizes": (lambda v: isinstance(v, list) and len(v) >= 2 and all(map(_COUNT[0], v)), "two whole numbers or more"),
    "verdict": _one_of("transfers", "drifts", "undecided"),
    "drift": _OBJECT,
}


def check(contents: Any) -> None:
    """Check a file's contents, as JSON has them.

    Raises:
        PresetError: an entry is missing, unknown or not what it must be; names the entry and says what it must be.
    """
    _check("the file", contents, _SCHEMA)
    if contents["preset"] not in PRESETS:
        _bad("preset", contents["preset"], f"one of {', '.join(PRESETS)}")
    constants_of.check(contents["preset"], contents["constants"], PRESETS)
    _check("optimizer", contents["optimizer"], _OPTIMIZER)
    study = contents["provenance"]
    _check("provenance", study, _PROVENANCE)
    for size in study["sizes"] or [None]:
        if not _SIZES[0](size):
            _bad("provenance.sizes", size, _SIZES[1])
    if len(study["loss"]) != len(study["log2_lr"]):
        _bad("provenance.loss", study["loss"], f"as many as log2_lr, which has {len(study['log2_lr'])}")
    _check("provenance.log2_optimum", study["log2_optimum"], _INTERVAL)
    for grown in study["transfer"]:
        _check("provenance.transfer", grown, _GROWN)
        _check("provenance.transfer.drift", grown["drift"], {**_INTERVAL, "value": _or_null(_NUMBER)})


def load(path: str | Path, parse: Callable[[Any], T], missing: str) -> T:
    """What a JSON file holds.

    Args:
        path: of the file, for messages too.
        parse: makes it from the contents.
        missing: what to say where there is no such file, with {error} in it.

    Raises:
        PresetError: the file cannot be read, or `parse` refuses it; names file and entry.
    """
    try:
        return parse(json.loads(Path(path).read_text()))
    except PresetError as error:
        raise PresetError(f"{path}: {error}") from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PresetError(f"{path}: {missing.format(error=error)}") from error


def same_keys(where: str, keys: Iterable[str], wanted: Iterable[str]) -> None:
    """Whether an object has the entries that it must have.

    Args:
        where: begins the message.
        keys: of the object.
        wanted: those it must have, in the order of the message.

    Raises:
        PresetError: some are missing or unknown.
    """
    wanted = tuple(wanted)
    missing, unknown = sorted(set(wanted) - set(keys)), sorted(set(keys) - set(wanted))
    if missing or unknown:
        raise PresetError(f"{where} must have {', '.join(wanted)}; missing {missing}, unknown {unknown}")


def _check(where: str, value: Any, schema: Mapping[str, Check]) -> None:
    if not isinstance(value, dict):
        _bad(where, value, "an object")
    same_keys(where, value, schema)
    for name, (fits, wanted) in schema.items():
        if not fits(value[name]):
            _bad(name if where == "the file" else f"{where}.{name}", value[name], wanted)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _bad(where: str, value: Any, wanted: str) -> NoReturn:
    raise PresetError(f"{where} is {value!r:.60}; it must be {wanted}")
