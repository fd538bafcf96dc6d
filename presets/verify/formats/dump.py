"""`Dump`: what a training program gives every parameter of one model, whatever framework it is of, and its JSON file.

A file is an object of parameters by name, {"lm_head.weight": {"shape": [256, 64], "std": 0.125, "lr": 1e-3, "wd": 0.1, "eps": 1e-8,
"multiplier": 0.25}}, and "model", what the forward pass multiplies by and what shapes do not show: {"optimizer": "adamw",
"head_dim": 16, "layers": 2, "attention": 0.25, "branch": 1, "readout": 0.25}. What is left out is not judged.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from mupax.disk import DEEPEST, nested_deeper
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import PresetError
from mupax.presets.rule import Decay

Column = Literal["std", "lr", "wd", "eps", "multiplier"]
COLUMNS: tuple[Column, ...] = get_args(Column)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter's numbers, absolute. None is not known; a multiplier that is left out is 1.

    Attributes:
        shape: of the array.
        std: standard deviation of its entries at the start.
        lr: its learning rate at the peak of the schedule; under Muon what multiplies the orthogonalized update.
        wd: weight decay.
        eps: of Adam.
        multiplier: what the forward pass multiplies the weight, or what it writes, by.
        role: what the parameter is, where a format says it; empty: its name says it.
    """

    shape: tuple[int, ...]
    std: float | None = None
    lr: float | None = None
    wd: float | None = None
    eps: float | None = None
    multiplier: float = 1.0
    role: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dump:
    """All parameters of one model, and what is no parameter's.

    Attributes:
        source: the file, for messages.
        parameters: by name.
        optimizer: one of `OPTIMIZERS`; None where the file does not say.
        decay: how weight decay enters.
        head_dim: size of a head, N.
        layers: residual blocks, L; counted in the names unless given.
        encoder_layers: those of an encoder, where it has another number.
        attention: what attention logits q.k are multiplied by, 1/sqrt(N) or the like.
        branch: what every residual branch is multiplied by.
        readout: what the output of a readout that is the embedding's table is multiplied by; None: it has a table of its own.
        notes: what the format leaves open, one sentence each.
    """

    source: str
    parameters: Mapping[str, Entry]
    optimizer: str | None = None
    decay: Decay | None = None
    head_dim: int | None = None
    layers: int | None = None
    encoder_layers: int | None = None
    attention: float | None = None
    branch: float | None = None
    readout: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parameters:
            raise PresetError(f"{self.source} has no parameters")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise PresetError(
                f"{self.source}: no optimizer is named {self.optimizer!r}; write {', '.join(OPTIMIZERS)}"
            )
        if self.decay not in (None, *get_args(Decay)):
            raise PresetError(
                f"{self.source}: decay is {self.decay!r}; write {' or '.join(get_args(Decay))}"
            )


MODEL = tuple(
    f.name for f in dataclasses.fields(Dump) if f.name not in ("source", "parameters", "notes")
)
"""What "model" may have."""
_COUNTS = ("head_dim", "layers", "encoder_layers")
_ENTRY = ("shape", *COLUMNS, "role")


def of_json(contents: Any, source: str) -> Dump:
    """The dump in an object read from JSON.

    Args:
        contents: the object.
        source: the file, for messages.

    Raises:
        PresetError: a key that is none, a shape that is none, a number that is none or is negative.
    """
    if not isinstance(contents, dict):
        raise PresetError(f'{source}: write an object, {{"name": {{"shape": [...], "std": ...}}}}')
    contents = dict(contents)
    model = contents.pop("model", {})
    _check_keys(f'{source}: "model"', model, MODEL)
    for key, value in model.items():
        if key in ("optimizer", "decay") or value is None:
            continue
        if key in _COUNTS and (type(value) is not int or value < 1):
            raise PresetError(
                f'{source}: "model" {key} is {value!r}; write a whole number of at least 1'
            )
        _check_number(f'{source}: "model" {key}', value, zero=False)
    parameters = {}
    for name, entry in contents.items():
        _check_keys(f"{source}: {name}", entry, _ENTRY)
        shape = entry.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise PresetError(
                f"{source}: {name} has the shape {shape!r}; write a list of whole numbers, [] for a scalar"
            )
        for column in COLUMNS:
            if entry.get(column) is not None:
                _check_number(
                    f"{source}: {name} {column}", entry[column], zero=column != "multiplier"
                )
        filled = {column: entry[column] for column in COLUMNS if entry.get(column) is not None}
        parameters[name] = Entry(shape=tuple(shape), role=entry.get("role", ""), **filled)
    return Dump(source=source, parameters=parameters, **model)


def read_json(path: Path) -> Any:
    """What a JSON file holds; raises PresetError where it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise PresetError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PresetError(f"{path} is no JSON: {error}") from None
    except RecursionError:
        raise PresetError(f"{path} is no JSON of parameters: nested too deep") from None
    if nested_deeper(content, DEEPEST):  # which the reader of JSON takes from Python 3.13 on
        raise PresetError(f"{path} is no JSON of parameters: nested too deep")
    return content


def _check_keys(where: str, entry: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        raise PresetError(f"{where} is {entry!r:.60}; write an object with {', '.join(allowed)}")
    for key in entry:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"write {', '.join(allowed)}"
            raise PresetError(f"{where} has no {key!r}; {hint}")


def _check_number(where: str, value: Any, *, zero: bool) -> None:
    number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not number or value < 0 or (value == 0 and not zero):
        raise PresetError(
            f"{where} is {value!r}; write a finite number {'of at least' if zero else 'above'} 0"
        )
