"""What mirrors are given: the numbers of a row by tag, and media, which only TensorBoard shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How the numbers of an array are spread.

    Attributes:
        low: the smallest of them.
        high: the largest.
        counts: of equal parts from low to high, int [parts].
        total: their sum.
        squares: the sum of their squares.
    """

    low: float
    high: float
    counts: np.ndarray
    total: float
    squares: float


@dataclasses.dataclass(frozen=True)
class Media:
    """What is shown of one step besides numbers, by tag.

    Attributes:
        images: uint8 [H, W, C] with C = 1 or 3.
        texts: Markdown.
        histograms: of arrays.
    """

    images: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    histograms: Mapping[str, Histogram] = dataclasses.field(default_factory=dict)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics, by their tag."""
    scalars = {}
    for key, value in row.items():
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
            group, _, name = key.partition("_")
            tag = key if "/" in key else f"{group}/{name}" if group in ("eval", "perf") else f"train/{key}"
            scalars[tag] = value
    return scalars
