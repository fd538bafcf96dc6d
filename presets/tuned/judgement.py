"""The verdict on a drift of the best learning rate: the one definition, for studies, pages and tuned presets.

A drift is in octaves of the best learning rate per doubling of what grows, with a 95 % interval:

* transfers: the estimate is within `TOLERANCE`, and the interval inside `BOUND` on both sides;
* drifts: the interval lies wholly outside `TOLERANCE`, on one side;
* undecided: everything else, and every drift without an interval.

No drift can be both: an interval that lies outside `TOLERANCE` has its estimate outside too.
"""

from __future__ import annotations

import math
from typing import Literal

TOLERANCE = 0.15
"""Octaves per doubling up to which a drift counts as none."""
BOUND = 0.30
"""Octaves per doubling within which the interval of a drift that transfers must lie."""
Verdict = Literal["transfers", "drifts", "undecided"]


def judge(value: float | None, low: float | None, high: float | None) -> Verdict:
    """Return the verdict on a drift.

    Args:
        value: the estimate, in octaves per doubling; None or nan where nothing could be fitted.
        low: lower end of its 95 % interval; None or an infinity where nothing bounds it.
    """
    if value is None or low is None or high is None or not math.isfinite(value):
        return "undecided"
    if low > TOLERANCE or high < -TOLERANCE:
        return "drifts"
    is_small = abs(value) <= TOLERANCE
    return "transfers" if is_small and low >= -BOUND and high <= BOUND else "undecided"
