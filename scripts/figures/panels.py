"""How the figures look: a row of panels, and a power law in one of them, with the slope that is predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.run.report.plotting import BLUE, GREY, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, SKY, PINK, GOLD = "#009E73", "#56B4E9", "#CC79A7", "#B8860B"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, GOLD)
"""Of the series of a panel, in order; told apart by colour-blind readers (from Okabe and Ito's palette)."""


def row(count: int, title: str, *, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A picture with `count` quiet panels side by side; no window is opened."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * count, height), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    axes = [figure.add_subplot(1, count, index + 1) for index in range(count)]
    for one in axes:
        quiet(one)
    return figure, axes


def quiet(axes: Axes) -> None:
    """Grid behind the data, no box."""
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(which="both", colors="#444444", labelsize=9)


def label(axes: Axes, title: str, x: str, y: str, *, legend: bool = False) -> None:
    """Name the panel and its axes, and show its legend if asked for."""
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
    marker: str = "o",
    predicted: float | None = None,
) -> None:
    """Geometric means over seeds of values [sizes, seeds] with every seed as a faint dot, over sizes, both logarithmic.

    Args:
        axes: panel.
        sizes: [sizes].
        values: positive, [sizes, seeds].
        name: of the series in the legend.
        color: of the series.
        marker: of the means.
        predicted: exponent, drawn as a dashed line through the middle of the means.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    x, y = np.asarray(sizes, float), np.asarray(values, float)
    middle = np.exp(np.log(y).mean(axis=1))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(
        np.repeat(x, y.shape[1]), y.ravel(), ".", color=color, alpha=0.25, markersize=4, zorder=2
    )
    axes.plot(
        x,
        middle,
        "-",
        marker=marker,
        color=color,
        markersize=5,
        linewidth=1.4,
        label=name,
        zorder=3,
    )
    if predicted is not None:
        line = np.exp(np.log(middle).mean() + predicted * (np.log(x) - np.log(x).mean()))
        axes.plot(x, line, "--", color=GREY, linewidth=1.1, zorder=1)
    shown = sorted({*axes.xaxis.get_majorticklocs(), *x}) if len(axes.lines) > 3 else x
    axes.xaxis.set_major_locator(FixedLocator([one for one in shown if x.min() <= one <= x.max()]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")


def add_legend(axes: Axes) -> None:
    """A small legend without a frame, where there is room."""
    axes.legend(fontsize=8, frameon=False)


def by_layer(axes: Axes, ends: Any, sizes: Any, data: Any, alpha_l: float) -> None:
    """Mean diagonals of finite models' kernels by block, the limits of the recursion beside them as dashed lines.

    Args:
        axes: panel.
        ends: pairs (alpha_A, alpha_L).
        sizes: of the models, [sizes]; the smallest, a middle one and the largest are drawn.
        data: `by_layer` [pairs, sizes, L + 1, 2] and `limit` [pairs, L + 1, 2].
        alpha_l: whose pairs are drawn.
    """
    chosen = sorted({0, len(sizes) // 2, len(sizes) - 1})
    pairs = [(index, alpha_a) for index, (alpha_a, other) in enumerate(ends) if other == alpha_l]
    for color, (index, alpha_a) in zip(COLORS, pairs, strict=False):
        by_size, limit = (
            np.asarray(data["by_layer"][index])[..., 0],
            np.asarray(data["limit"][index])[:, 0],
        )
        for fade, size in zip((0.35, 0.6, 1.0), chosen, strict=False):
            axes.plot(by_size[size], "o", color=color, alpha=fade, markersize=2 + 3 * fade)
        axes.plot(
            limit, "--", color=color, linewidth=1.3, label=rf"recursion, $\alpha_A$ = {alpha_a:g}"
        )
    axes.plot(
        [],
        [],
        "o",
        color=GREY,
        markersize=5,
        label=f"models, faint to full: {', '.join(str(sizes[c]) for c in chosen)}",
    )
    add_legend(axes)
