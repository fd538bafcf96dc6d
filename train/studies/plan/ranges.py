"""Rows of a plan's table, and the ranges of a planned time or memory, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mupax.terminal import gib
from mupax.train.pods.topology import ROOM

NONE = "no interval"
"""Interval of a prediction whose error is unknown."""
NOT_PREDICTED = "not predicted"
"""Value of a loss that no law predicts."""
PUBLISHED_MFU = 0.213
"""Lowest model FLOPs utilization of the published large runs, that of GPT-3.

PaLM (2204.02311), table 3, has 21.3 to 46.2 %. PaLM counts causal attention in full, while
`mupax.zoo.families` counts half. By the count of mupax the same run would have a little less.
"""
MFU_SOURCE = f"to {PUBLISHED_MFU:.1%} MFU, the lowest of PaLM's table 3 (2204.02311)"

Range = tuple[float, float | None] | None
"""Lowest and highest value, or `None` if neither is known.

The highest is `None` if there is no upper end.
"""


class PlanRow(NamedTuple):
    """Row of a plan's table.

    Attributes:
        name: Name of the value.
        value: The value, as text.
        interval: Interval or range of the value. Empty if the value is exact.
        source: Recipe, rule or study from which the value comes.
    """

    name: str
    value: str
    interval: str
    source: str


def of_roofline(bound: float, utilization: float) -> tuple[Range, str]:
    """Return the range of a step's seconds from the compiler's bound, and its source.

    The range ends at the seconds of the lowest published utilization.

    Args:
        bound: Seconds of the step's roofline, which no run beats.
        utilization: Model FLOPs utilization at that bound.
    """
    highest = bound * utilization / PUBLISHED_MFU
    if highest <= bound:
        return (bound, None), "which is below every published MFU, so that there is no upper end"
    return (bound, highest), MFU_SOURCE


def of_settings(step: float, speed: float, speeds: Sequence[float]) -> tuple[Range, str]:
    """Return the range of a step's seconds between a study's settings, and its source.

    Args:
        step: Seconds of a step at `speed`.
    """
    if len(speeds) < 2:
        return None, ""
    shortest = step * speed / max(speeds)
    longest = step * speed / min(speeds)
    return (shortest, longest), "its fastest to its slowest setting"


def memory(expected: float) -> tuple[str, str]:
    """Return the range of a device's memory as text, and its source.

    Args:
        expected: Bytes by the formula of `mupax.train.pods.estimates`.
    """
    # Compilers need up to 1 / ROOM times the formula.
    interval = f"{gib(int(expected))} to {gib(int(expected / ROOM))}"
    return interval, f"compilers took up to {1 / ROOM:.2f} times that"


def text(band: Range, unit: float, template: str = "{:,.1f}") -> str:
    """Return a range as text.

    Args:
        band: Range of a step's seconds.
        unit: Printed value of one second per step, such as the run's hours for it.
        template: Format of a number, "{:,.1f}" by default.
    """
    if band is None:
        return NONE
    lowest, highest = band
    low = template.format(lowest * unit)
    if highest is None:
        return f"at least {low}"
    return f"{low} to {template.format(highest * unit)}"
