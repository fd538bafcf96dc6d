"""Parts of a mapping. Their order is the order of the mapping, not of the keys asked for."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def select_keys(values: Mapping[Key, Value], keys: Container[Key]) -> dict[Key, Value]:
    """Return the entries whose key is in `keys`. A key that `values` lacks is no error."""
    return {key: value for key, value in values.items() if key in keys}


def drop_keys(values: Mapping[Key, Value], keys: Container[Key]) -> dict[Key, Value]:
    """Return the entries whose key is not in `keys`."""
    return {key: value for key, value in values.items() if key not in keys}


def drop_none(values: Mapping[Key, Value | None]) -> dict[Key, Value]:
    """Return the entries whose value is not `None`."""
    return {key: value for key, value in values.items() if value is not None}
