"""The effective theory's figure 3 at one width over a longer run.

The run shows whether a low rate costs less once it has enough steps to train.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels, rates
from scripts.figures.effective import excess, fig_effective_language
from scripts.figures.result import Data, Figure, Row, Settings, mean, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare what rates below the best one cost (`excess.rows`), and the least losses.

    The rows have ntk less standard. Rows without a finite estimate are left out.
    """
    curves = {name: rates.curves(of_strategy) for name, of_strategy in data.items()}
    table = excess.rows(
        "n", settings["width"], curves, ["standard", "ntk", *settings["embeddings"]]
    )
    table += fig_effective_language.least(settings["width"], curves)
    return [row for row in table if math.isfinite(row.measured)]


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw losses against the hidden rate, and the cost of rates below the best one."""
    title = f"An encoder-decoder of n = {settings['width'][-1]}, {settings['steps']} steps"
    figure, (left, right) = panels.row(2, title)
    for color, (name, of_strategy) in zip(panels.COLORS, data.items(), strict=False):
        curve = rates.curves(of_strategy)[-1]
        _draw_means(left, curve.x, curve.losses, color, name)
        octaves_below = []
        costs = []
        for octaves in (0.5, 1.0, 1.5, 2.0):
            cost = excess.excess(curve, octaves)
            if np.isfinite(cost).all():
                octaves_below.append(octaves)
                costs.append(cost)
        _draw_means(right, octaves_below, costs, color, name)
    panels.label(left, "Training loss", "log2 of the hidden rate", "nats")
    panels.label(right, "What lower rates cost", "octaves below the best", "nats")
    low, high = left.get_ylim()
    left.set_ylim(low, high + 0.15 * (high - low))  # room for the legend above the curves
    panels.add_legend(left)
    return figure


def _draw_means(axes: Any, x: Any, values: Any, color: str, name: str) -> None:
    """Draw means over seeds of values [x][seeds], with their 95 % intervals.

    Args:
        name: Name of the series in the legend.
    """
    intervals = np.array([mean(of_seeds) for of_seeds in values])
    means = intervals[:, 0]
    half_widths = [means - intervals[:, 1], intervals[:, 2] - means]
    axes.errorbar(x, means, yerr=half_widths, fmt="o-", color=color, capsize=3, ms=4, label=name)


FIGURE = Figure(
    title="The effective theory's figure 3 over a longer run",
    source="figure 3 of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034)",
    about="Training loss of the encoder-decoders of [figures 3 to "
    "5](#the-effective-theorys-figures-3-to-5-encoder-decoders-at-rates-below-the-best) at width n "
    "= 64, trained for 600 steps instead of 150, with ten seeds instead of three.\n\n"
    "The warm-up grows in proportion. A claim that holds here and not there only lacked "
    "steps and seeds. The control is standard with ntk's learning rates of the tables. It "
    "loses what standard has over ntk, so the tables' rates are why a rate below the best "
    "costs ntk less.",
    **settings_of(__name__),
    measure=fig_effective_language.measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
