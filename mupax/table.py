"""Entries of tables of plug-ins. What an entry needs is imported when it is looked up or called.

An entry says by an import inside a function where its object is, so that editors and the type checker find it.
"""

from __future__ import annotations

import importlib
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Lazy(Generic[P, R]):
    """A function that is imported when it is called.

    Args:
        load: imports the function and returns it.
    """

    def __init__(self, load: Callable[[], Callable[P, R]]) -> None:
        self.load = load

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.load()(*args, **kwargs)


class LazyRegistry(UserDict[str, Callable[P, R]]):
    """Names to functions. An entry is imported when it is looked up; one that is set later may be any function.

    Args:
        entries: name to what imports the function and returns it.
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
    """Return the function of an entry. A user may write MODULE:FUNCTION in its place, which is imported here.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such function.
    """
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def module_of(entry: object) -> str:
    """Return the name of the module that an entry of a table comes from: a function, a class, or MODULE:FUNCTION."""
    if isinstance(entry, str):
        return entry.partition(":")[0]
    return getattr(entry, "__module__", None) or "__main__"
