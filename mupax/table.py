"""A table from names to functions, each imported when it is looked up: what a run does not name, it does not load."""

from __future__ import annotations

import importlib
from collections import UserDict
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class LazyRegistry(UserDict[str, T]):
    """Names to objects, of which an entry says where it is; one set later may be the object itself.

    Args:
        package: whose modules the entries name.
        places: name to MODULE:OBJECT.
    """

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        super().__init__()
        self._package = package
        self.data.update(places)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __getitem__(self, name: str) -> T:
        entry = self.data[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            self.data[name] = getattr(importlib.import_module(f"{self._package}.{module}"), attribute)
        return self.data[name]
