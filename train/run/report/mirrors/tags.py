"""What mirrors call the numbers of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics, by their tag."""
    scalars = {}
    for key, value in row.items():
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
            group, _, name = key.partition("_")
            tag = key if "/" in key else f"{group}/{name}" if group in ("eval", "perf") else f"train/{key}"
            scalars[tag] = value
    return scalars
