"""Rows of a plan's table, and the ranges of a planned time or memory, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mupax.terminal import gib
from mupax.train.pods.topology import ROOM

NONE = "no interval"
"""Text in place of an interval, for a value whose error is unknown."""
NOT_PREDICTED = "not predicted"
"""Text in place of a loss that no law predicts."""
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
    """Return the range of a step's seconds from the compiler's lower bound up, and its source.

    The range begins at `bound` and ends at the seconds at `PUBLISHED_MFU`, the lowest published
    utilization. It has no upper end if that time is not above `bound`.

    Args:
        bound: Seconds of the step's roofline, which no run beats.
        utilization: Model FLOPs utilization at that bound, as a fraction.
    """
    highest = bound * utilization / PUBLISHED_MFU
    if highest <= bound:
        return (bound, None), "which is below every published MFU, so that there is no upper end"
    return (bound, highest), MFU_SOURCE


def of_settings(step: float, speed: float, speeds: Sequence[float]) -> tuple[Range, str]:
    """Return the range of a step's seconds by the speeds of a study's runs, and its source as text.

    It reaches from the fastest to the slowest speed. With fewer than two speeds the range is `None`
    and the source is "".

    Args:
        step: Seconds of a step of the planned run at `speed`.
        speed: FLOP/s at which `step` was computed.
        speeds: FLOP/s of each setting (model, batch and tokens) of the study.
    """
    if len(speeds) < 2:
        return None, ""
    shortest = step * speed / max(speeds)
    longest = step * speed / min(speeds)
    return (shortest, longest), "its fastest to its slowest setting"


def memory(expected: float) -> tuple[str, str]:
    """Return the range of a device's memory and the source of its upper end, both as text.

    Args:
        expected: Bytes by the formula of `mupax.train.pods.estimates`.
    """
    # Compiled programs took up to 1 / ROOM times the formula's bytes.
    interval = f"{gib(int(expected))} to {gib(int(expected / ROOM))}"
    return interval, f"compilers took up to {1 / ROOM:.2f} times that"


def text(band: Range, unit: float, template: str = "{:,.1f}") -> str:
    """Return a range of a step's seconds as text, in the unit of the run's time or cost.

    The text is "LOW to HIGH", "at least LOW" without an upper end, or `NONE` without a range.

    Args:
        band: Lowest and highest seconds of a step.
        unit: Factor from seconds per step to the printed number, such as steps / 3600 for hours.
        template: Format of a number, "{:,.1f}" by default.
    """
    if band is None:
        return NONE
    lowest, highest = band
    low = template.format(lowest * unit)
    if highest is None:
        return f"at least {low}"
    return f"{low} to {template.format(highest * unit)}"
