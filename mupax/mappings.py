"""Functions that select entries of mappings, and registries of plug-ins such as presets.

Selected entries keep the order of the mapping, not of the keys asked for. The modules of a registry
are imported only when they are needed: each entry is a function with an import inside, so that
editors and the type checker can follow it.
"""

from __future__ import annotations

import importlib
from collections import UserDict
from collections.abc import Callable, Container, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

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


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Lazy(Generic[P, R]):
    """Callable that imports a function at each call and calls the function.

    Args:
        load: Function that does the import and returns the imported function.
    """

    def __init__(self, load: Callable[[], Callable[P, R]]) -> None:
        self.load = load

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.load()(*args, **kwargs)


class LazyRegistry(UserDict[str, Callable[P, R]]):
    """Dict of functions by name, which imports a function when it is first looked up.

    Functions that are set later are returned unchanged.

    Args:
        entries: Functions by name. Each does an import and returns the imported function.
    """

    def __init__(self, entries: Mapping[str, Callable[[], Callable[P, R]]]) -> None:
        super().__init__()
        for name, load in entries.items():
            self.data[name] = Lazy(load)

    def __getitem__(self, name: str) -> Callable[P, R]:
        entry = self.data[name]
        if isinstance(entry, Lazy):
            self.data[name] = entry.load()
        return self.data[name]


def function_of(entry: F | str) -> F:
    """Return the function that an entry of a registry is, or names as `MODULE:FUNCTION`.

    The module of a named function is imported.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module has no such function.
    """
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def module_of(entry: object) -> str:
    """Return the name of the module that defines the function or class of a registry's entry.

    The result is "__main__" for an object that does not name its module.

    Args:
        entry: Function, class or text `MODULE:FUNCTION`.
    """
    if isinstance(entry, str):
        return entry.partition(":")[0]
    return getattr(entry, "__module__", None) or "__main__"
