"""How a chart of this project looks: colours, axes that suit loss curves, and names beside the lines they name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From Okabe and Ito's palette: told apart by colour-blind readers.
BLUE, ORANGE = "#0072B2", "#D55E00"
GREY, INK = "#6E6E6E", "#222222"
MORE = (("#009E73", "s"), ("#CC79A7", "^"), ("#56B4E9", "D"), ("#E69F00", "v"), ("#000000", "X"))
"""Colours and markers of further lines in one panel; a sixth line has those of the first again."""
LOG_STEPS = 100
"""Runs of at least so many steps are drawn over log(step); on a linear axis the first drop is all there is to see."""


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred means of values [N], nan where a value is not finite.

    The window grows with the step up to a 25th of the run: there is no lag, and a steep start stays steep.
    """
    index = np.arange(len(values))
    half = np.minimum(index // 10, len(values) // 50)
    start, stop = index - half, np.minimum(index + half + 1, len(values))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    means = (sums[stop] - sums[start]) / np.maximum(counts[stop] - counts[start], 1)
    return np.where(finite, means, math.nan)


def style(axes: Axes, first: int, last: int) -> None:
    """Quiet a panel's axes, with steps on x.

    Args:
        axes: of the panel.
        first: step at the left.
        last: step at the right; x is logarithmic where it is at least `LOG_STEPS`.
    """
    if last >= LOG_STEPS:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        axes.set_xlim(max(first, 1) * 0.9, last * 1.1)
    else:
        axes.set_xlim(first - 0.02 * (last - first) - 0.5, last + 0.02 * (last - first) + 0.5)
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(which="both", colors="#444444", labelsize=9)


def limits(axes: Axes, values: np.ndarray, *, log: bool) -> None:
    """Fit y to the finite values, on a log axis to the positive ones, with round numbers as its ticks.

    Args:
        axes: of the panel.
        values: all that is drawn in it, of any shape.
        log: whether y is logarithmic.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, high = (values.min(), values.max()) if values.size else (1.0, 2.0)
    if not log:
        pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        axes.set_ylim(low - pad, high + pad)
        return
    pad = max((high / low) ** 0.05, 1.02)
    axes.set_yscale("log")
    axes.set_ylim(low / pad, high * pad)
    # Round numbers, few enough to read: the coarsest list that has five of them in sight. Matplotlib lays out what is out of sight, too.
    powers = range(math.floor(math.log10(low / pad)), math.ceil(math.log10(high * pad)) + 1)
    coarse = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
    for leads in (*coarse, np.arange(10, 100) / 10):
        ticks = [lead * 10.0**power for power in powers for lead in leads]
        ticks = [tick for tick in ticks if low / pad <= tick <= high * pad]
        if len(ticks) >= 5:
            break
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")


def second_scale(axes: Axes, factor: float, label: str) -> None:
    """Draw the y axis a second time, further left, with the numbers of its ticks in another unit.

    Args:
        axes: panel whose ticks are set.
        factor: numbers in the other unit over those in the panel's.
        label: name of the other unit.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    second = axes.secondary_yaxis(-0.13, functions=(lambda y: np.asarray(y) * factor, lambda y: np.asarray(y) / factor))
    second.yaxis.set_major_locator(FixedLocator([tick * factor for tick in axes.get_yticks()]))
    second.yaxis.set_minor_locator(NullLocator())
    second.yaxis.set_major_formatter(lambda tick, _: f"{tick:.3g}")
    second.set_ylabel(label, color=INK)
    second.tick_params(colors=INK, labelsize=8)
    second.spines["left"].set_color(GREY)


def margin_labels(axes: Axes, labels: Sequence[tuple[float, str, str]], gap: float) -> None:
    """Name values in the right margin of the panel, each tied to its value by a line.

    Args:
        axes: panel whose limits are set.
        labels: y, text and colour of each. One that the axis cannot show (0 on a log axis) is left out.
        gap: least distance of two names, as a fraction of the panel's height.
    """
    placed = []
    for value, text, color in sorted(labels):
        height = axes.transAxes.inverted().transform(axes.transData.transform((1, value)))[1]
        if math.isfinite(height):
            placed.append((float(height), text, color))
    heights = spread([height for height, _, _ in placed], gap)
    for (height, text, color), room in zip(placed, heights, strict=True):
        axes.annotate(
            text,
            xy=(1.0, height),
            xytext=(1.035, room),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.8, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)},
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights (least squares) that keep a gap: isotonic regression by its min-max formula.

    scipy.optimize has it too, which takes half a second to load.

    Args:
        heights: rising.
        gap: least distance of two.
    """
    count, low = len(heights), [height - rank * gap for rank, height in enumerate(heights)]
    return [
        rank * gap + max(min(fmean(low[i:j]) for j in range(rank + 1, count + 1)) for i in range(rank + 1))
        for rank in range(count)
    ]
