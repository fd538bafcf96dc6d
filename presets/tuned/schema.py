"""What a tuned preset's file must have, entry by entry. `presets/tuned/find.py` says what each means."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mupax.presets import constants as constants_of
from mupax.presets.roles import AXES, PresetError
from mupax.presets.rule import FAMILIES, FORMS

FORMAT = "tuned preset 1"
"""First entry of a file; another layout gets another number."""
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

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
    "name": _one_of(*FAMILIES),
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


def check(given: Any, makers: Mapping[str, Callable[..., Any]]) -> None:
    """Check a file's contents.

    Args:
        given: what JSON gave.
        makers: preset name to the function that makes it (`presets.PRESETS`).

    Raises:
        PresetError: an entry is missing, unknown or not what it must be; names the entry and says what it must be.
    """
    _check("the file", given, _SCHEMA)
    if given["preset"] not in makers:
        _bad("preset", given["preset"], f"one of {', '.join(makers)}")
    constants_of.check(given["preset"], given["constants"], makers)
    _check("optimizer", given["optimizer"], _OPTIMIZER)
    found = given["provenance"]
    _check("provenance", found, _PROVENANCE)
    for size in found["sizes"] or [None]:
        if not _SIZES[0](size):
            _bad("provenance.sizes", size, _SIZES[1])
    if len(found["loss"]) != len(found["log2_lr"]):
        _bad("provenance.loss", found["loss"], f"as many as log2_lr, which has {len(found['log2_lr'])}")
    _check("provenance.log2_optimum", found["log2_optimum"], _INTERVAL)
    for grown in found["transfer"]:
        _check("provenance.transfer", grown, _GROWN)
        _check("provenance.transfer.drift", grown["drift"], {**_INTERVAL, "value": _or_null(_NUMBER)})


def _check(where: str, given: Any, schema: Mapping[str, Check]) -> None:
    if not isinstance(given, dict):
        _bad(where, given, "an object")
    if set(given) != set(schema):
        missing, unknown = sorted(set(schema) - set(given)), sorted(set(given) - set(schema))
        raise PresetError(f"{where} must have {', '.join(schema)}; missing {missing}, unknown {unknown}")
    for name, (fits, wanted) in schema.items():
        if not fits(given[name]):
            _bad(name if where == "the file" else f"{where}.{name}", given[name], wanted)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _bad(where: str, value: Any, wanted: str) -> NoReturn:
    raise PresetError(f"{where} is {value!r:.60}; it must be {wanted}")
