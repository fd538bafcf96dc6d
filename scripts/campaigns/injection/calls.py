"""What is done to a process before it starts: a call of a function fails or waits, an option or a variable is another."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Action = Callable[[], object]


def at_call(module: str, name: str, call: int, wrapped: Callable[..., Any]) -> None:
    """Have a function, `name` of a module or of a class in it, replaced at its `call`-th call."""
    owner, calls = importlib.import_module(module), [0]
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return wrapped(real, *args, **options) if calls[0] == call else real(*args, **options)

    setattr(owner, name, counted)


def strike() -> None:
    """Note in the file that STRUCK names that the fault has come now."""
    Path(os.environ["STRUCK"]).touch()


def struck(action: Action) -> Action:
    """Return what notes that the fault has come, and then does an action."""

    def sick() -> None:
        strike()
        action()

    return sick


def when(place: tuple[str, str], call: int, action: Action, after: bool = False) -> Action:
    """Return what has an action done at a call of a function: before it, or after it."""

    def wrapped(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if after:
            real(*args, **options)
        struck(action)()
        return real(*args, **options)

    return partial(at_call, *place, call, wrapped)


def with_result(place: tuple[str, str], change: Callable[[Any], Any]) -> Action:
    """Return what changes the result of a function's first call."""

    def wrapped(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        strike()
        return change(real(*args, **options))

    return partial(at_call, *place, 1, wrapped)


def variable(name: str, value: str) -> Action:
    """Return what sets a variable of the environment."""
    return partial(os.environ.__setitem__, name, value)


def option(name: str, value: Any) -> Action:
    """Return what sets an option of JAX."""

    def sick() -> None:
        import jax

        jax.config.update(name, value)

    return sick
