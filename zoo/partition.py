"""How activations lie on devices. Models name logical axes; whoever runs them says, by a `Layout`, what the names mean.

Logical axes of activations: batch, sequence, and those that parameters have too (heads, kv_heads, mlp, vocab, classes);
None is an axis that no device splits. Without a layout nothing is constrained and the default backend is meant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import jax

Axes = tuple[str | None, ...]


class Layout(Protocol):
    """What a model may ask of the devices it is compiled for."""

    platform: str
    """cpu, gpu or tpu: that of the devices, which need not be this machine's."""

    def splits(self, axis: str) -> bool: ...

    def names(self, axis: str | None) -> tuple[str, ...]:
        """The mesh axes that split a logical axis, for collectives inside `local`; empty where nothing does."""
        ...

    def ways(self, axis: str | None) -> int: ...

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array: ...

    def local(self, function: Callable[..., Any], inputs: tuple[Axes, ...], outputs: Any) -> Callable[..., Any]:
        """`function` on every device's own part: for kernels that the compiler cannot split.

        Args:
            function: of arrays, which it gets as one device's parts.
            inputs: logical axes of every argument.
            outputs: those of the result, or a tuple of them for a tuple of results.
        """
        ...


_CURRENT: ContextVar[Layout | None] = ContextVar("layout", default=None)


@contextlib.contextmanager
def using(layout: Layout | None) -> Iterator[None]:
    """Trace models for this layout."""
    token = _CURRENT.set(layout)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Layout | None:
    """The layout being traced for."""
    return _CURRENT.get()


def platform() -> str:
    """cpu, gpu or tpu, whichever is being compiled for."""
    return jax.default_backend() if (layout := current()) is None else layout.platform


def splits(axis: str) -> bool:
    """Whether a logical axis is split over more than one device."""
    return (layout := current()) is not None and layout.splits(axis)


def ways(axis: str) -> int:
    """Parts that a logical axis is split into."""
    return 1 if (layout := current()) is None else layout.ways(axis)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x, laid out by the logical axes of its dimensions."""
    return x if (layout := current()) is None else layout.constrain(x, axes)
