"""Look of the figures: rows of panels, and power laws with their predicted slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.run.report.plotting import BLUE, GREY, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour-blind readers can tell these colours apart: all but gold are from Okabe and Ito's palette.
GREEN = "#009E73"
SKY = "#56B4E9"
PINK = "#CC79A7"
GOLD = "#B8860B"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, GOLD)
"""Colours of a panel's series, in their order."""


def row(count: int, title: str, *, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels side by side, and its panels. No window is opened."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * count, height), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    axes = [figure.add_subplot(1, count, index + 1) for index in range(count)]
    for panel in axes:
        quiet(panel)
    return figure, axes


def quiet(axes: Axes) -> None:
    """Draw a panel's grid behind its data, and only the left and bottom sides of its frame."""
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(which="both", colors="#444444", labelsize=9)


def label(axes: Axes, title: str, x: str, y: str, *, legend: bool = False) -> None:
    """Write a panel's title and the names of its axes, and add its legend if `legend` is set."""
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if legend:
        add_legend(axes)


def power_law(
    axes: Axes,
    sizes: Any,
    values: Any,
    name: str,
    *,
    color: str = BLUE,
    predicted: float | None = None,
) -> None:
    """Draw geometric means over seeds against sizes, and a faint dot for every seed.

    Both axes are logarithmic.

    Args:
        sizes: Sizes [sizes].
        values: Positive values [sizes, seeds].
        name: Name of the series in the legend.
        predicted: Predicted exponent, drawn as a dashed line through the middle of the means.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    x = np.asarray(sizes, float)
    y = np.asarray(values, float)
    middle = np.exp(np.log(y).mean(axis=1))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(
        np.repeat(x, y.shape[1]), y.ravel(), ".", color=color, alpha=0.25, markersize=4, zorder=2
    )
    axes.plot(
        x,
        middle,
        "o-",
        color=color,
        markersize=5,
        linewidth=1.4,
        label=name,
        zorder=3,
    )
    if predicted is not None:
        line = np.exp(np.log(middle).mean() + predicted * (np.log(x) - np.log(x).mean()))
        axes.plot(x, line, "--", color=GREY, linewidth=1.1, zorder=1)

    # A panel that already has a series keeps the ticks of the series' sizes.
    ticks = x
    if len(axes.lines) > 3:
        ticks = sorted({*axes.xaxis.get_majorticklocs(), *x})
    ticks_in_range = [tick for tick in ticks if x.min() <= tick <= x.max()]
    axes.xaxis.set_major_locator(FixedLocator(ticks_in_range))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")


def add_legend(axes: Axes) -> None:
    """Add a small legend without a frame to a panel, at the emptiest place."""
    axes.legend(fontsize=8, frameon=False)


def by_layer(axes: Axes, ends: Any, sizes: Any, data: Any, alpha_l: float) -> None:
    """Draw mean diagonals of finite models' kernels against the block, and the recursion's.

    Models are dots and the recursion is a dashed line.

    Args:
        ends: Pairs [alpha_A, alpha_L] of exponents.
        sizes: Sizes of the models [sizes]. The smallest, a middle and the largest size are drawn.
        data: Means `by_layer` [pairs, sizes, L + 1, 2] and `limit` [pairs, L + 1, 2] of a record.
            The last axis has the mean of the diagonal and the mean off the diagonal.
        alpha_l: Exponent of the depth; only pairs [.., alpha_l] are drawn.
    """
    chosen = sorted({0, len(sizes) // 2, len(sizes) - 1})
    pairs = []
    for index, pair in enumerate(ends):
        if pair[1] == alpha_l:
            pairs.append((index, pair[0]))
    for color, (index, alpha_a) in zip(COLORS, pairs, strict=False):
        by_size = np.asarray(data["by_layer"][index])[..., 0]
        limit = np.asarray(data["limit"][index])[:, 0]
        for opacity, size in zip((0.35, 0.6, 1.0), chosen, strict=False):
            axes.plot(by_size[size], "o", color=color, alpha=opacity, markersize=2 + 3 * opacity)
        name = rf"recursion, $\alpha_A$ = {alpha_a:g}"
        axes.plot(limit, "--", color=color, linewidth=1.3, label=name)
    chosen_sizes = ", ".join(str(sizes[index]) for index in chosen)
    name = f"models, faint to full: {chosen_sizes}"
    axes.plot([], [], "o", color=GREY, markersize=5, label=name)
    add_legend(axes)
