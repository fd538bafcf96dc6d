"""Decoder as configs describe it: its sizes, the shapes that follow from them, and config fields.

The formats of this folder compute the values of each role, and `entries` puts them together.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from mupax.mappings import drop_none
from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.dump import Dump, Entry

Columns = Mapping[str, float | None]
"""Values of one parameter by the names in `Entry`, such as "std". `None` if a file has no value."""


class ModelFile(abc.ABC):
    """Parsed file of another program that describes a model. Some formats also name its base."""

    @abc.abstractmethod
    def dump(self) -> Dump:
        """Return the dump of the model that the file describes."""

    def base(self) -> Dump | None:
        """Return the dump of the base model.

        The result is `None` if the file names no base, or if the model is its own base.
        """
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder. `head_dim * heads` may differ from the width."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int = 0


def entries(
    sizes: Sizes, names: Mapping[str, str], columns: Mapping[str, Columns]
) -> dict[str, Entry]:
    """Return an `Entry` (shape and values) for every named parameter, by name.

    Shapes are in PyTorch's layout: (out, in).

    Args:
        names: Parameter name by role. "block.qkv" is one matrix for queries, keys and values.
        columns: Values by role. Every role of `names` needs an item.
    """
    shapes = _shapes(sizes)
    parameters = {}
    for role, name in names.items():
        # `Entry` has a default of its own for a value that the file does not give.
        values = drop_none(columns[role])
        parameters[name] = Entry(shape=shapes[role], role=role, **values)
    return parameters


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of each role's parameter in PyTorch's layout: (out, in)."""
    width = sizes.width
    query_rows = sizes.heads * sizes.head_dim
    key_rows = sizes.kv_heads * sizes.head_dim
    return {
        "token_embedding": (sizes.vocab, width),
        "position": (sizes.positions, width),
        "block.query": (query_rows, width),
        "block.key": (key_rows, width),
        "block.value": (key_rows, width),
        "block.qkv": (query_rows + 2 * key_rows, width),
        "block.attention_out": (width, query_rows),
        "block.mlp_in": (sizes.mlp, width),
        "block.mlp_out": (width, sizes.mlp),
        "block.norm_gain": (width,),
        "norm_gain": (width,),
        "readout": (sizes.vocab, width),
    }


class Fields:
    """Fields of a config, checked when they are read, with defaults for missing ones.

    The defaults are those of the program that reads the config.

    Args:
        values: Values that the file gives, by name. `None` counts as not given.
        source: Name of the file, with which messages begin.
        defaults: Values that the program uses for names that the file does not give.
    """

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any]) -> None:
        self.values = values
        self.source = source
        self.defaults = defaults

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a field's value in the file, else the program's default, else `None`."""
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def flag(self, name: str) -> bool:
        """Return a field as a bool. The words "true", "1" and "yes" are true in any case."""
        value = self.get(name)
        # bool('false') is true, and words of a command line are text.
        if isinstance(value, str):
            return value.lower() in ("true", "1", "yes")
        return bool(value)

    def number(self, name: str) -> float:
        """Return a field as a finite number of at least 0.

        Raises:
            PresetError: The value is missing, is no number, is negative or is infinite.
        """
        value = self.get(name)
        if value is None:
            raise PresetError(f"{self.source} does not say {name}; write it into the file")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise PresetError(
                f"{self.source}: {name} is {value!r}; write the number, "
                "not a shell's or a template's word for it"
            ) from None
        # In this form the comparison also refuses NaN.
        if not 0 <= number < float("inf"):
            raise PresetError(
                f"{self.source}: {name} is {value!r}; write a finite number of at least 0"
            )
        return number

    def count(self, name: str) -> int:
        """Return a field as a whole number of at least 1.

        Raises:
            PresetError: The value is missing or is no such number.
        """
        number = self.number(name)
        if number < 1 or number != int(number):
            raise PresetError(
                f"{self.source}: {name} is {self.get(name)!r}; write a whole number of at least 1"
            )
        # A count may be written as 2048.0, or be a word of a command line.
        return int(number)

    def count_or(self, name: str, fallback: int) -> int:
        """Return a field as `count` does, or the fallback if the file does not give it."""
        return self.count(name) if name in self else fallback
