"""Actions that prepare a fault in a process: failing calls, changed options.

A forked process calls its action before it starts mupax (`tiny_runs.Session`). Most actions replace
a function, so that the fault comes later, when mupax calls that function.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Action = Callable[[], object]
Place = tuple[str, str]
"""Name of a module, and dotted name of a function in it."""


def replace_call(module: str, name: str, call: int, replacement: Callable[..., Any]) -> None:
    """Replace one call of a function.

    Args:
        module: Name of the module of the function.
        name: Dotted name of the function in the module, such as `Class.method`.
        call: Number of the call that is replaced, from 1.
        replacement: Function that is called instead, with the real function and its arguments.
    """
    owner = importlib.import_module(module)
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = getattr(owner, name)
    num_calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            return replacement(real, *args, **options)
        return real(*args, **options)

    setattr(owner, name, counted)


def strike() -> None:
    """Touch the file that the environment variable STRUCK names, to record when the fault came."""
    Path(os.environ["STRUCK"]).touch()


def struck(action: Action) -> Action:
    """Return an action that calls `strike`, which records the time, and then calls `action`."""

    def sick() -> None:
        strike()
        action()

    return sick


def on_call(place: Place, call: int, action: Action, after: bool = False) -> Action:
    """Return an action that patches a function, so that one call of it also calls `action`.

    Args:
        call: Number of the call at which `action` is called, from 1.
        action: Action that is called before the real function.
        after: Call the real function twice: before `action`, too.
    """

    def replacement(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if after:
            real(*args, **options)
        struck(action)()
        return real(*args, **options)

    return partial(replace_call, *place, call, replacement)


def with_result(place: Place, change: Callable[[Any], Any]) -> Action:
    """Return an action that patches a function, so that its first call returns another result.

    Args:
        change: Function from the real result to the changed one.
    """

    def replacement(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        strike()
        return change(real(*args, **options))

    return partial(replace_call, *place, 1, replacement)


def variable(name: str, value: str) -> Action:
    """Return an action that sets a variable of the environment."""
    return partial(os.environ.__setitem__, name, value)


def option(name: str, value: Any) -> Action:
    """Return an action that sets an option of JAX."""

    def sick() -> None:
        import jax

        jax.config.update(name, value)

    return sick
