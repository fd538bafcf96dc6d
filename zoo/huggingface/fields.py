"""Values of a config.json, each of the kind it must be: such a file may come from anyone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mupax.zoo.configs import ConfigError

_LARGEST = 2**31 - 1


class Fields:
    """Fields of a config by kind; one that is left out, or null, has its default.

    Every method raises ConfigError where the value is of another kind.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def whole(self, name: str, default: int) -> int:
        value = self._given(name, default)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise ConfigError(f"config.json: {name} is {shown(value)}, not a whole number from 1 to {_LARGEST}")
        return value

    def side(self, name: str, default: int) -> int:
        """The side of a square, given as one number or as two equal ones."""
        value = self._given(name, default)
        if isinstance(value, list):
            if len(value) != 2 or value[0] != value[1]:
                raise ConfigError(f"config.json: {name} is {shown(value)}; our images and patches are square")
            return Fields({name: value[0]}).whole(name, default)
        return self.whole(name, default)

    def number(self, name: str, default: float) -> float:
        value = self._given(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf or value > 1e30:
            raise ConfigError(f"config.json: {name} is {shown(value)}, not a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._given(name, default)
        if type(value) is not bool:
            raise ConfigError(f"config.json: {name} is {shown(value)}, not true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._given(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"config.json: {name} is {shown(value)}, not a text")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, Any]) -> Any:
        """What a text that is one of several stands for."""
        value = self.text(name, default)
        if value not in choices:
            raise ConfigError(f"config.json: {name} is {shown(value)}; only {', '.join(choices)} are read")
        return choices[value]

    def refuse(self, name: str, plain: bool, what: str) -> None:
        """Refuse a switch that is not as in a plain model."""
        if self.flag(name, plain) is not plain:
            raise ConfigError(f"config.json: {name} is {not plain}: {what}, which our models do not have")

    def _given(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value


def shown(value: Any) -> str:
    """A value in a message: short, and without characters that a terminal would obey."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
