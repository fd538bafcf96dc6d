"""Reader of untrusted config fields, such as those of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from mupax.disk import shown
from mupax.zoo.families import ConfigError

_LARGEST = 2**31 - 1
_LARGEST_FLOAT = 1e30

T = TypeVar("T", int, float, bool, str)

_DESCRIPTIONS: dict[type, str] = {
    bool: "true or false",
    int: f"a whole number from 1 to {_LARGEST}",
    float: f"a number above 0 and at most {_LARGEST_FLOAT:g}",
    str: "a text",
}
"""Description of the values that a field may have, by the field's type, for error messages."""


def _is_valid(value: Any, kind: type) -> bool:
    """Return True if a JSON value is allowed in a field of type `kind` (`_DESCRIPTIONS`)."""
    # isinstance(True, int) is True, so the type is compared exactly.
    if kind is bool:
        return type(value) is bool
    if kind is int:
        return type(value) is int and 1 <= value <= _LARGEST
    if kind is float:
        # JSON may write a whole float without a point. Comparing an int with 1e30 never overflows,
        # but float() of an int above 1.8e308 raises OverflowError.
        return type(value) in (int, float) and 0 < value <= _LARGEST_FLOAT
    return isinstance(value, str)


class Fields:
    """Fields of an untrusted config.json, read by name and checked.

    A field that is missing or null has its default, and every value must have the default's type.
    Every method raises ConfigError for a value that is not allowed.

    Args:
        fields: Parsed content of config.json. Its values may be of any type.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def read(self, name: str, default: T) -> T:
        """Return the value of a field, converted to the type of its default.

        Args:
            default: Value of a missing or null field. Its type limits the field's values: an int
                is from 1 to 2^31 - 1, a float above 0 and at most 1e30.
        """
        value = self.fields.get(name)
        if value is None:
            value = default
        kind = type(default)
        if not _is_valid(value, kind):
            raise ConfigError(f"config.json: {name} is {shown(value)}, not {_DESCRIPTIONS[kind]}")
        return kind(value)

    def optional(self, name: str, default: T | None) -> T | None:
        """Return the value of a field, or `None` if config.json has null for it.

        Args:
            default: Value of a missing field. If it is `None`, the field must be a whole number.
        """
        if name not in self.fields:
            return default
        if self.fields[name] is None:
            return None
        return self.read(name, 1 if default is None else default)  # pyright: ignore

    def side(self, name: str, default: int) -> int:
        """Return the side of a square, which may be one number or a list of two equal numbers.

        Args:
            default: Value of a missing or null field.
        """
        value = self.fields.get(name)
        if not isinstance(value, list):
            return self.read(name, default)
        if len(value) != 2 or value[0] != value[1]:
            raise ConfigError(
                f"config.json: {name} is {shown(value)}; our images and patches are square"
            )
        return Fields({name: value[0]}).read(name, default)

    def choice(self, name: str, default: str, choices: Mapping[str, Any]) -> Any:
        """Return the value in `choices` for the text that a field holds.

        Args:
            default: Text that stands for a missing or null field. It must be a key of `choices`.
            choices: Allowed texts, each with the value to return.
        """
        value = self.read(name, default)
        if value not in choices:
            raise ConfigError(
                f"config.json: {name} is {shown(value)}; only {', '.join(choices)} are read"
            )
        return choices[value]

    def refuse(self, name: str, plain: bool, feature: str) -> None:
        """Raise ConfigError if a boolean field turns on a feature that our models do not have.

        Args:
            plain: Value that means "without the feature". It stands for a missing or null field.
            feature: Name of the feature, for the message.
        """
        if self.read(name, plain) is not plain:
            raise ConfigError(
                f"config.json: {name} is {not plain}: {feature}, which our models do not have"
            )
