"""Between what a time or a memory may lie: where something honest is known of it, with its source; else "no interval"."""

from __future__ import annotations

from collections.abc import Sequence

from mupax.terminal import gib
from mupax.train.pods.search import ROOM

NONE = "no interval"
"""Of a prediction of which nothing says how wrong it may be."""
NOT_PREDICTED = "not predicted"
"""Of a loss of which no law says anything."""
PUBLISHED_MFU = 0.213
"""Lowest model FLOPs utilization of the published large runs, GPT-3's; PaLM (2204.02311), table 3, has 21.3 to 46.2 %.

PaLM counts causal attention in full and `mupax.zoo.families` half: by ours the same run would have a little less.
"""
MFU_SOURCE = f"to {PUBLISHED_MFU:.1%} MFU, the lowest of PaLM's table 3 (2204.02311)"

Range = tuple[float, float | None] | None
"""Lowest and highest; None where a range has no upper end, or there is none."""


def of_roofline(bound: float, utilization: float) -> tuple[Range, str]:
    """Seconds of a step from the compiler's bound to those at the lowest published utilization, and what says so.

    Args:
        bound: seconds of the step's roofline.
        utilization: model FLOPs utilization at that bound.
    """
    highest = bound * utilization / PUBLISHED_MFU
    if highest <= bound:
        return (bound, None), "which is below every published MFU, so that there is no upper end"
    return (bound, highest), MFU_SOURCE


def of_settings(step: float, speed: float, speeds: Sequence[float]) -> tuple[Range, str]:
    """Seconds of a step at the fastest and at the slowest setting's speed.

    Args:
        step: seconds at `speed`.
        speed: FLOP/s that is counted with.
        speeds: FLOP/s of each setting.
    """
    if len(speeds) < 2:
        return None, ""
    return (
        step * speed / max(speeds),
        step * speed / min(speeds),
    ), "its fastest to its slowest setting"


def memory(expected: float) -> tuple[str, str]:
    """What the compiler may take of an expected number of bytes, and what says so.

    Args:
        expected: by the formula.
    """
    return (
        f"{gib(int(expected))} to {gib(int(expected / ROOM))}",
        f"compilers took up to {1 / ROOM:.2f} times that",
    )


def text(band: Range, unit: float, shown: str = "{:,.1f}") -> str:
    """A range in a word.

    Args:
        band: of seconds of a step.
        unit: what one second of a step comes to in the shown number.
        shown: of the number, a format.
    """
    if band is None:
        return NONE
    low = shown.format(band[0] * unit)
    return f"at least {low}" if band[1] is None else f"{low} to {shown.format(band[1] * unit)}"
