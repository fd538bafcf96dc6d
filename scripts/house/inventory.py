"""Inventory of the names that users write and read, from flags and config fields to exit codes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import typing
from collections.abc import Iterator
from typing import Any

from mupax import presets
from mupax.train.config import record as config_record
from mupax.train.config.cli import is_recipe
from mupax.train.config.data import SOURCES
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.zoo.configs import CONFIGS
from scripts import ROOT
from scripts.house import commands
from scripts.house.digests import digest

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
_INPUT_ROW = re.compile(r"^\| `(.+)` \| (\d) \| ", re.MULTILINE)
_DOCUMENTED = re.compile(
    r"^\.\. auto(module|function|class|exception):: (mupax\.[\w.]+)$", re.MULTILINE
)


def record() -> dict[str, Any]:
    """Return all names by kind: flags, config fields, exports, presets, data sources, exit codes.

    Recipes and models have digests of their configs.
    """
    os.environ["COLUMNS"] = "400"  # wide help does not break a flag between lines
    recipes = {}
    for name, make in RECIPES.items():
        recipes[name] = digest(config_record.to_json(make()))
    models = {}
    for name, model in CONFIGS.items():
        models[name] = digest(config_record.model_to_json(model))
    return {
        "flags": {name: flags(words) for name, words in commands.COMMANDS.items()},
        "fields": dict(fields(Config)),
        "exports": exports(),
        "recipes": recipes,
        "models": models,
        "presets": {name: defaults(make) for name, make in presets.PRESETS.items()},
        "data sources": sorted(SOURCES),
        "exit codes": exit_codes(),
    }


def flags(words: tuple[str, ...]) -> list[str]:
    """Return the flags in a command's help.

    Args:
        words: Words of the command after `mupax`.

    Raises:
        RuntimeError: The help failed.
    """
    complete = ["--help"]
    # A recipe's plain help lists only the common flags.
    if words[0] == "train" and is_recipe(words[1]):
        complete = ["--help", "all"]
    page = commands.done([*words, *complete])
    return sorted(set(_FLAG.findall(page)))


def fields(owner: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name of every config field, with its type and default as text.

    Args:
        owner: Config dataclass, whose nested dataclasses are entered recursively.
        prefix: Text before all names, such as `model.`.
    """
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        name = f"{prefix}{field.name}"
        nested = hints[field.name]
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            yield from fields(nested, f"{name}.")
        elif field.default is not dataclasses.MISSING:
            yield name, f"{nested} = {field.default!r}"
        else:
            yield name, f"{nested}"


def exports() -> dict[str, Any]:
    """Return the names in docs/reference/api.md with their signatures or public members."""
    names: dict[str, Any] = {}
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    for sort, name in _DOCUMENTED.findall(page):
        if sort == "module":
            names[name] = sorted(getattr(importlib.import_module(name), "__all__", ()))
            continue
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        if inspect.isclass(value):
            names[name] = {member: _signature(value, member) for member in _members(value)}
        else:
            names[name] = str(inspect.signature(value))
    return names


def _members(owner: type[Any]) -> list[str]:
    """Return the public members that mupax's own classes declare, without inherited builtins."""
    declared: set[str] = set()
    for base in owner.__mro__:
        if base.__module__.startswith("mupax."):
            # Fields of a dataclass without a default are annotations only.
            declared |= {*vars(base), *vars(base).get("__annotations__", ())}
    return sorted(name for name in declared if not name.startswith("_"))


def _signature(owner: type[Any], name: str) -> str:
    """Return a method's signature, or "attribute" for another member."""
    member = getattr(owner, name, None)
    if inspect.isroutine(member) and callable(member):
        return str(inspect.signature(member))
    return "attribute"


def defaults(make: Any) -> dict[str, str]:
    """Return the parameters of a preset's constructor with their defaults."""
    parameters = inspect.signature(make).parameters
    return {name: repr(parameter.default) for name, parameter in parameters.items()}


def exit_codes() -> dict[str, int]:
    """Return command lines of tests/train/inputs.md with the exit codes that the file states."""
    rows = _INPUT_ROW.findall((ROOT / "tests" / "train" / "inputs.md").read_text())
    return {words: int(code) for words, code in rows}
