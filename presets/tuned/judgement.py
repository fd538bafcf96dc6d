"""Verdict on how far the best learning rate drifts as a model grows.

Studies, documentation pages and tuned presets use it. A drift is in octaves of the best learning
rate per doubling of a size, with a 95 % interval:

* transfers: the estimate is within `TOLERANCE`, and the interval is inside `BOUND` on both sides;
* drifts: the interval lies wholly outside `TOLERANCE`, on one side;
* undecided: everything else, and every drift without an interval.

No drift can be both: an interval that lies outside `TOLERANCE` has its estimate outside, too.
"""

from __future__ import annotations

import math
from typing import Literal

TOLERANCE = 0.15
"""Largest drift that counts as none, in octaves per doubling."""
BOUND = 0.30
"""Largest absolute value, in octaves per doubling, of the interval of a drift that transfers."""
Verdict = Literal["transfers", "drifts", "undecided"]


def judge(value: float | None, low: float | None, high: float | None) -> Verdict:
    """Return the verdict on a drift of the best learning rate.

    "drifts" is an interval wholly above `TOLERANCE` or below -`TOLERANCE`. "transfers" is an
    estimate within `TOLERANCE` whose interval is within `BOUND`. All else is "undecided".

    Args:
        value: Estimate in octaves per doubling. `None` or nan if nothing could be fitted.
        low: Lower end of the 95 % interval. `None` or an infinity if there is no bound.
        high: Upper end of the 95 % interval. `None` or an infinity if there is no bound.
    """
    if value is None or low is None or high is None or not math.isfinite(value):
        return "undecided"
    if low > TOLERANCE or high < -TOLERANCE:
        return "drifts"

    is_small = abs(value) <= TOLERANCE
    is_bounded = low >= -BOUND and high <= BOUND
    if is_small and is_bounded:
        return "transfers"
    return "undecided"
