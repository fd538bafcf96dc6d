"""Picture of a transfer study: loss against learning rate, one curve per size."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.run.report import plotting
from mupax.train.run.report.plotting import INK, ORANGE
from mupax.train.studies.transfer.drift import Analysis
from mupax.train.studies.transfer.fit import Curve
from mupax.train.studies.transfer.study import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE = 3.0
"""Ratio of the greatest to the least loss above which the axis of losses is logarithmic."""
ACROSS = 3
"""Most panels in a row."""
MARKERS = "os^DvP"
"""Markers of the sizes, so that curves can be told apart without their shades."""
LETTERS = 40
"""Number of letters in a line of a panel's title."""
LOSSES = {
    "training": "training loss (nats), mean over the last tenth",
    "evaluation": "evaluation loss (nats) after the last step",
}
"""Labels of the y axis, by the kind of loss that is drawn."""


def draw(
    path: Path,
    studies: Sequence[tuple[Measured, Analysis]],
    title: str,
    loss: str = LOSSES["training"],
) -> None:
    """Draw loss against learning rate as a PNG, a panel per study, at most `ACROSS` in a row.

    Curves go from light (smallest size) to dark (largest), each with a marker of its own. Faint
    points are seeds. A cross at the top is a rate at which a seed diverged. A ringed point is a
    fitted optimum with its interval. The dashed line is the smallest size's optimum.

    Args:
        path: PNG file, which is replaced if it exists.
        studies: Studies in the order of their panels. The legend has the sizes of one of them.
        title: Line above all panels, such as recipe and axis.
        loss: Label of the y axis; `LOSSES["training"]` by default.
    """
    from matplotlib.figure import Figure

    across = min(len(studies), ACROSS)
    down = -(-len(studies) // across)
    drawn = Figure(figsize=(max(7.5, 1.2 + 3.9 * across), 4.3 * down), layout="constrained")
    axes = drawn.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    grid: list[Axes] = list(axes.flat)
    panels = grid[: len(studies)]
    for empty in grid[len(studies) :]:
        empty.set_axis_off()
    drawn.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    for panel, (measured, analysis) in zip(panels, studies, strict=True):
        draw_study(panel, analysis, measured.curves)
        letters = 2 * LETTERS if across == 1 else LETTERS
        label = textwrap.fill(measured.study.label, letters, break_on_hyphens=False)
        panel.set_title(
            f"{label}\n{drift_words(analysis)}{_price_line(analysis)}",
            fontsize=10,
            loc="left",
            color=INK,
        )
        panel.set_xlabel("peak learning rate", fontsize=9)
        panel.grid(color="#E6E6E6", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors="#444444", labelsize=9)

    losses = []
    for measured, _ in studies:
        losses += [curve.losses.ravel() for curve in measured.curves]
    all_losses = np.concatenate(losses)
    finite_losses = all_losses[np.isfinite(all_losses)]
    is_wide = False
    if finite_losses.size:
        # The comparison with 0 keeps losses that have no log off a logarithmic axis.
        is_wide = finite_losses.max() > WIDE * finite_losses.min() > 0
    # Panels share their axes, so the limits of one are those of all.
    plotting.limits(panels[0], finite_losses, log=bool(is_wide))
    for leftmost in panels[::across]:
        leftmost.set_ylabel(loss, fontsize=9)
    panels[across - 1].legend(
        title=studies[0][0].study.axis,
        fontsize=9,
        title_fontsize=9,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    drawn.savefig(path, dpi=130)


def draw_study(panel: Axes, analysis: Analysis, curves: Sequence[Curve]) -> None:
    """Draw loss against learning rate and the fitted best rates of one study into a panel.

    Args:
        curves: Losses of every size, the smallest first.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    top: Any = {"transform": panel.get_xaxis_transform(), "clip_on": False, "in_layout": False}
    for index, (size, curve) in enumerate(zip(analysis.sizes, curves, strict=True)):
        # The first third of the colour map is hardly seen on white.
        colour = colormaps["Blues"](0.35 + 0.65 * index / max(1, len(curves) - 1))
        marker = MARKERS[index % len(MARKERS)]
        # Later seeds exist only near the minimum, and are NaN at all other rates.
        mean = np.nanmean(curve.losses, axis=1)
        finite = np.isfinite(mean)
        panel.plot(
            curve.x[finite],
            mean[finite],
            f"{marker}-",
            color=colour,
            lw=1.8,
            ms=4.5,
            label=f"{size}",
        )
        panel.plot(curve.x, curve.losses, "o", color=colour, ms=2.2, alpha=0.35, zorder=1)
        panel.plot(curve.x[~finite], np.ones((~finite).sum()), "x", color=colour, ms=6, **top)

        fitted = analysis.fits[index]
        optimum = analysis.optima[index]
        if fitted.trouble:
            continue
        if math.isfinite(optimum.half_width):
            panel.errorbar(
                fitted.optimum,
                fitted.loss,
                xerr=optimum.half_width,
                color=ORANGE,
                capsize=3,
                zorder=4,
            )
        panel.plot(
            fitted.optimum, fitted.loss, "o", ms=5, mfc=colour, mec=ORANGE, mew=1.4, zorder=5
        )
    # An empty plot puts the rings into the legend, below the curves.
    panel.plot([], [], "o", ms=5, mfc="none", mec=ORANGE, mew=1.4, label="best rate, 95 %")
    if not analysis.fits[0].trouble:
        dashed: Any = {"color": "#888888", "linewidth": 1, "linestyle": (0, (4, 3)), "zorder": 0}
        panel.axvline(analysis.fits[0].optimum, label=f"best rate of {analysis.sizes[0]}", **dashed)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")


def _price_line(analysis: Analysis) -> str:
    """Return a title line on the loss that the largest size has at the smallest size's best rate.

    The line says how much greater that loss is than at the largest size's own best rate. It is ""
    if this is unknown or there is only one size.
    """
    price = analysis.prices[-1]
    if len(analysis.sizes) == 1 or math.isnan(price.value):
        return ""
    cost = "diverges" if math.isinf(price.value) else f"costs {price.value:.3f} nats"
    return f"\nat {analysis.sizes[-1]} the best rate of {analysis.sizes[0]} {cost}"


def drift_words(analysis: Analysis) -> str:
    """Return the drift of the best learning rate with its verdict, as text for a panel's title.

    With a single size the text is that size's best rate, or the reason why it has none.
    """
    if len(analysis.sizes) == 1:
        return analysis.fits[0].trouble or f"best rate {2.0 ** analysis.fits[0].optimum:.3g}"
    drift = analysis.drift
    if not math.isfinite(drift.value):
        return "undecided: no drift could be fitted"
    width = f" ± {drift.half_width:.2f}" if math.isfinite(drift.half_width) else ""
    return f"{drift.value:+.2f}{width} octaves per doubling: {analysis.verdict}"
