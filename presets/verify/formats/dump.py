"""`Dump`: what a training program gives every parameter of one model, and its JSON file.

A dump file is an object with one entry per parameter, and "model" for values that belong to no
single parameter:

    {
      "lm_head.weight": {"shape": [256, 64], "std": 0.125, "lr": 1e-3, "wd": 0.1, "eps": 1e-8,
                         "multiplier": 0.25},
      "model": {"optimizer": "adamw", "head_dim": 16, "layers": 2, "attention": 0.25,
                "branch": 1, "readout": 0.25}
    }

A `multiplier` that is left out is 1. A `shape`, and the `readout` of a tied readout, must be there.
Any other value that is left out is not judged.
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
    """Values that a program gives one parameter, absolute and not relative to a base.

    `None` means that the file does not give the value.

    Attributes:
        shape: Shape of the array.
        std: Initial standard deviation of the array's entries.
        lr: Learning rate at the peak of the schedule. Under Muon, the factor on the orthogonalized
            update.
        wd: Weight decay, as the optimizer is given it.
        eps: Adam's eps.
        multiplier: Factor of the forward pass on the weight or on its output.
        role: Role of the parameter if the format gives one. Empty if only the name shows it.
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
    """Description of one model by the program that trains it, the input of `mupax verify`.

    It has values for each parameter, and values that belong to no single parameter. `None` stands
    for a value that the file does not give, unless an entry below says otherwise.

    Attributes:
        source: Name of the file, for messages.
        parameters: Entries by parameter name.
        optimizer: Name of the optimizer, which may not be in `OPTIMIZERS`. `None` if the file gives
            none.
        decay: "coupled" if weight decay is multiplied by the learning rate, otherwise
            "independent".
        head_dim: Size of an attention head, N.
        layers: Number of residual blocks, L. `None` if the names show it.
        encoder_layers: Number of an encoder's blocks, if it differs from `layers`.
        attention: Factor on the attention logits q.k, such as 1/sqrt(N).
        branch: Factor on every residual branch.
        readout: Factor on the logits if the readout is the embedding's table. `None` if the readout
            has a table of its own.
        notes: Sentences on what the format leaves open.
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
        if not isinstance(self.optimizer, str | None):
            raise PresetError(
                f"{self.source}: the optimizer is {self.optimizer!r}; "
                f"write one of {', '.join(OPTIMIZERS)}"
            )
        if self.decay not in (None, *get_args(Decay)):
            raise PresetError(
                f"{self.source}: decay is {self.decay!r}; write {' or '.join(get_args(Decay))}"
            )


OTHER_NAMES = {
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "adamw8bit": "adamw",
    "pagedadamw": "adamw",
    "pagedadamw8bit": "adamw",
    "adam8bit": "adam",
    "pagedadam8bit": "adam",
}
"""Names of classes that train as an optimizer of `OPTIMIZERS` does, in small letters.

Those of NVIDIA Apex and DeepSpeed decay weights as AdamW does unless `adam_w_mode` is off."""
_NOT_IN_MODEL = ("source", "parameters", "notes")
_MODEL_KEYS = tuple(
    field.name for field in dataclasses.fields(Dump) if field.name not in _NOT_IN_MODEL
)
_COUNTS = ("head_dim", "layers", "encoder_layers")
_ENTRY_KEYS = ("shape", *COLUMNS, "role")


def parse_dump(contents: Any, source: str) -> Dump:
    """Convert the contents of a JSON file in mupax's own format to a `Dump`.

    Args:
        contents: Any value that `json.loads` returns. A value that is no dump is refused.
        source: Name of the file, as messages and `Dump.source` give it.

    Raises:
        PresetError: There is no parameter, a key, the optimizer or the kind of decay is unknown, a
            shape is no list of counts, or a value is no number, is negative or is infinite.
    """
    if not isinstance(contents, dict):
        raise PresetError(f'{source}: write an object, {{"name": {{"shape": [...], "std": ...}}}}')

    entries = dict(contents)
    model = entries.pop("model", {})
    _check_model(model, source)

    parameters = {name: _parse_entry(entry, name, source) for name, entry in entries.items()}
    about = dict(model)
    optimizer = about.get("optimizer")
    if isinstance(optimizer, str):  # `Dump` refuses any other value
        about["optimizer"] = OTHER_NAMES.get(optimizer, optimizer)
    return Dump(source=source, parameters=parameters, **about)


def _check_model(model: Any, source: str) -> None:
    _check_keys(f'{source}: "model"', model, _MODEL_KEYS)
    for key, value in model.items():
        if key in ("optimizer", "decay") or value is None:
            continue
        if key in _COUNTS and (type(value) is not int or value < 1):
            raise PresetError(
                f'{source}: "model" {key} is {value!r}; write a whole number of at least 1'
            )
        # Exponents are fitted to logarithms of these factors, so that 0 is refused.
        _check_number(f'{source}: "model" {key}', value, zero=False)


def _parse_entry(entry: Any, name: str, source: str) -> Entry:
    _check_keys(f"{source}: {name}", entry, _ENTRY_KEYS)

    shape = entry.get("shape")
    # `type` and not `isinstance`: JSON's true is an int to `isinstance`.
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise PresetError(
            f"{source}: {name} has the shape {shape!r}; "
            "write a list of whole numbers, [] for a scalar"
        )

    values = {}
    for column in COLUMNS:
        # null stands for an unknown value, like an entry that is left out.
        if entry.get(column) is not None:
            values[column] = entry[column]
    for column, value in values.items():
        # Eps is divided by the multiplier, so a multiplier of 0 is refused.
        _check_number(f"{source}: {name} {column}", value, zero=column != "multiplier")

    role = entry.get("role") or ""
    if not isinstance(role, str):
        raise PresetError(f"{source}: {name} has the role {role!r}; write a text, such as 'query'")
    return Entry(shape=tuple(shape), role=role, **values)


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        PresetError: The file cannot be read, is no JSON, or is nested too deep.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise PresetError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        # Wrong bytes, wrong JSON, or an integer of more than 4,300 digits.
        raise PresetError(f"{path} is no JSON: {error}") from None
    except RecursionError:
        raise PresetError(f"{path} is no JSON of parameters: nested too deep") from None
    # The depth at which `json` raises RecursionError differs between versions of Python.
    if nested_deeper(content, DEEPEST):
        raise PresetError(f"{path} is no JSON of parameters: nested too deep")
    return content


def _check_keys(place: str, entry: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        raise PresetError(f"{place} is {entry!r:.60}; write an object with {', '.join(allowed)}")
    for key in entry:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"write {', '.join(allowed)}"
            raise PresetError(f"{place} has no {key!r}; {hint}")


def _check_number(place: str, value: Any, *, zero: bool) -> None:
    """Raise `PresetError` unless a value is a finite number above 0, or 0 if `zero` allows it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_finite = is_number and math.isfinite(value)
    if not is_finite or value < 0 or (value == 0 and not zero):
        bound = "of at least" if zero else "above"
        raise PresetError(f"{place} is {value!r}; write a finite number {bound} 0")
