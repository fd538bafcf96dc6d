"""A config as the flags that make it from its recipe: what a command prints for somebody to go on with."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.zoo.configs import CONFIGS

ELSEWHERE = ("recipe", "workdir", "resume", "init", "distributed")
"""Fields that say where and how to start, not what."""


def words(config: Config) -> list[str] | None:
    """Flags that differ from the recipe's config; None where there is no such recipe, or no flag for a value."""
    if config.recipe not in RECIPES:
        return None
    base = RECIPES[config.recipe]()
    flags: list[str] = []
    bare = dataclasses.replace(config.model, compute=base.model.compute)
    named = [name for name, model in CONFIGS.items() if dataclasses.replace(model, compute=base.model.compute) == bare]
    if named and bare != base.model:
        flags += ["--model", named[0]]
        data = dataclasses.replace(base.data, name=config.data.name)
        base = dataclasses.replace(base, model=bare, data=data)
        flags += ["--data.name", shlex.quote(config.data.name)] if data != RECIPES[config.recipe]().data else []
    if base.model.family != config.model.family:
        return None
    differing = _differing(base.resolved(), config.resolved(), "")
    return None if differing is None else [*flags, *differing]


def _differing(base: Any, config: Any, prefix: str) -> list[str] | None:
    flags: list[str] = []
    for field in dataclasses.fields(config):
        was, value = getattr(base, field.name), getattr(config, field.name)
        if was == value or (not prefix and field.name in ELSEWHERE):
            continue
        flag = f"--{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            inner = _differing(was, value, f"{prefix}{field.name.replace('_', '-')}.")
            if inner is None:
                return None
            flags += inner
        elif isinstance(value, bool):
            flags.append(flag if value else f"--{prefix}no-{field.name.replace('_', '-')}")
        elif isinstance(value, tuple):
            if not value:
                return None
            flags += [flag, *map(shlex.quote, map(str, value))]
        else:
            flags += [flag, shlex.quote(str(value))]
    return flags
