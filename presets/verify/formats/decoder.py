"""A decoder as every config describes one: its parameters by role, with shapes from its sizes, and numbers by a rule of the format's own."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.dump import Dump, Entry


class Reading(abc.ABC):
    """What a file says, of which a dump can be parameters, and sometimes that of its base."""

    @abc.abstractmethod
    def dump(self) -> Dump:
        """What the file describes."""

    def base(self) -> Dump | None:
        """The same program at the size that it is relative to; None where the file names none."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a decoder. `head_dim` times `heads` need not be the width."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int = 0


Rule = Callable[[str], Mapping[str, float | None]]
"""Role, such as block.mlp_in, to the numbers of an `Entry`."""


def entries(sizes: Sizes, names: Mapping[str, str], rule: Rule) -> dict[str, Entry]:
    """The parameters that have a name, with the shapes of PyTorch (out, in).

    Args:
        sizes: of the model.
        names: role to the parameter's name; "block.qkv" stands for queries, keys and values in one.
        rule: the format's.
    """
    s = sizes
    rows = {
        "block.query": s.heads,
        "block.key": s.kv_heads,
        "block.value": s.kv_heads,
        "block.qkv": s.heads + 2 * s.kv_heads,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding": (s.vocab, s.width),
        "position": (s.positions, s.width),
        **{role: (heads * s.head_dim, s.width) for role, heads in rows.items()},
        "block.attention_out": (s.width, s.heads * s.head_dim),
        "block.mlp_in": (s.mlp, s.width),
        "block.mlp_out": (s.width, s.mlp),
        "block.norm_gain": (s.width,),
        "norm_gain": (s.width,),
        "readout": (s.vocab, s.width),
    }
    parameters = {}
    for role, name in names.items():
        columns = {column: number for column, number in rule(role).items() if number is not None}
        parameters[name] = Entry(shape=shapes[role], role=role, **columns)
    return parameters


class Fields:
    """Values of a config by name, with the defaults of its program, and one message for what cannot be one.

    Args:
        values: what the file says.
        source: the file.
        defaults: the program's own.
    """

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any]) -> None:
        self.values, self.source, self.defaults = values, source, defaults

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value, or the default."""
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def flag(self, name: str) -> bool:
        """A value that is true or false; a word of a command line is one too."""
        value = self.get(name)
        return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)

    def number(self, name: str) -> float:
        """A number above 0; raises PresetError where it is missing or none."""
        value = self.get(name)
        if value is None:
            raise PresetError(f"{self.source} does not say {name}; write it into the file")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise PresetError(
                f"{self.source}: {name} is {value!r}; write the number, not a shell's or a template's word for it"
            ) from None
        if not 0 <= number < float("inf"):
            raise PresetError(
                f"{self.source}: {name} is {value!r}; write a finite number of at least 0"
            )
        return number

    def count(self, name: str) -> int:
        """A whole number of at least 1; raises PresetError otherwise."""
        number = self.number(name)
        if number < 1 or number != int(number):
            raise PresetError(
                f"{self.source}: {name} is {self.get(name)!r}; write a whole number of at least 1"
            )
        return int(number)
