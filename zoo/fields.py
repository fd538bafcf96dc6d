"""Fields of a config that may come from anyone, each of the kind that it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from mupax.disk import shown
from mupax.zoo.families import ConfigError

_LARGEST = 2**31 - 1

T = TypeVar("T", int, float, bool, str)

_KINDS: dict[type, Any] = {
    bool: (lambda value: type(value) is bool, "true or false"),
    int: (
        lambda value: type(value) is int and 1 <= value <= _LARGEST,
        f"a whole number from 1 to {_LARGEST}",
    ),
    float: (
        lambda value: type(value) in (int, float) and 0 < value < math.inf and value <= 1e30,
        "a number above 0",
    ),
    str: (lambda value: isinstance(value, str), "a text"),
}
"""Type of a field to whether a value is of it, and what it is called."""


class Fields:
    """Fields of a config; one that is left out, or null, has its default, whose type every value must have.

    Every method raises ConfigError where a value is of another kind.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def read(self, name: str, default: T) -> T:
        """The value of a field, in its default's type.

        Args:
            name: in config.json.
            default: where the field is left out or null; values are of its type, whole numbers from 1, others above 0.
        """
        value, kind = self.fields.get(name), type(default)
        value = default if value is None else value
        fits, what = _KINDS[kind]
        if not fits(value):
            raise ConfigError(f"config.json: {name} is {shown(value)}, not {what}")
        return kind(value)

    def optional(self, name: str, default: T | None) -> T | None:
        """The same where null is a value: none.

        Args:
            name: in config.json.
            default: where the field is left out; None: so is the field's value then, a whole number else.
        """
        if name in self.fields and self.fields[name] is None:
            return None
        return (
            default
            if name not in self.fields
            else self.read(name, 1 if default is None else default)
        )  # pyright: ignore

    def side(self, name: str, default: int) -> int:
        """The side of a square, given as one number or as two equal ones.

        Args:
            name: in config.json.
            default: where the field is left out.
        """
        value = self.fields.get(name)
        if isinstance(value, list):
            if len(value) != 2 or value[0] != value[1]:
                raise ConfigError(
                    f"config.json: {name} is {shown(value)}; our images and patches are square"
                )
            return Fields({name: value[0]}).read(name, default)
        return self.read(name, default)

    def choice(self, name: str, default: str, choices: Mapping[str, Any]) -> Any:
        """What a text that is one of several stands for.

        Args:
            name: in config.json.
            default: where the field is left out; one of the choices.
            choices: every text that is read, to what it stands for.
        """
        value = self.read(name, default)
        if value not in choices:
            raise ConfigError(
                f"config.json: {name} is {shown(value)}; only {', '.join(choices)} are read"
            )
        return choices[value]

    def refuse(self, name: str, plain: bool, what: str) -> None:
        """Refuse a switch that is not as in a plain model.

        Args:
            name: in config.json.
            plain: value in a plain model, and where the field is left out.
            what: comes with the other value, for the message.
        """
        if self.read(name, plain) is not plain:
            raise ConfigError(
                f"config.json: {name} is {not plain}: {what}, which our models do not have"
            )
