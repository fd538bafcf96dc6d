"""The effective theory's figure 3 at one width over a longer run: whether a low rate costs less once it has the steps to train."""

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
    """What half and a quarter of the best rate cost, with the control, and the least losses."""
    curves = {name: rates.curves(of_strategy) for name, of_strategy in data.items()}
    table = excess.rows(
        "n", settings["width"], curves, ["standard", "ntk", *settings["embeddings"]]
    )
    table += fig_effective_language.least(settings["width"], curves)
    return [row for row in table if math.isfinite(row.measured)]


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Losses over hidden rates, and what rates below the best one cost, each with its 95 % interval over seeds."""
    figure, (left, right) = panels.row(
        2, f"An encoder-decoder of n = {settings['width'][-1]}, {settings['steps']} steps"
    )
    for color, (name, of_strategy) in zip(panels.COLORS, data.items(), strict=False):
        curve = rates.curves(of_strategy)[-1]
        below = [(octaves, excess.excess(curve, octaves)) for octaves in (0.5, 1.0, 1.5, 2.0)]
        _points(left, curve.x, curve.losses, color, name)
        there = [(octaves, values) for octaves, values in below if np.isfinite(values).all()]
        _points(
            right, [octaves for octaves, _ in there], [values for _, values in there], color, name
        )
    panels.label(left, "Training loss", "log2 of the hidden rate", "nats")
    panels.label(right, "What lower rates cost", "octaves below the best", "nats")
    low, high = left.get_ylim()
    left.set_ylim(low, high + 0.15 * (high - low))  # room for the legend above the curves
    panels.add_legend(left)
    return figure


def _points(axes: Any, x: Any, values: Any, color: str, name: str) -> None:
    each = np.array([mean(one) for one in values])
    room = [each[:, 0] - each[:, 1], each[:, 2] - each[:, 0]]
    axes.errorbar(x, each[:, 0], yerr=room, fmt="o-", color=color, capsize=3, ms=4, label=name)


FIGURE = Figure(
    title="The effective theory's figure 3 over a longer run",
    source="figure 3 of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034)",
    about="The models, data and strategies of [figures 3 to "
    "5](#the-effective-theorys-figures-3-to-5-encoder-decoders-at-rates-below-the-best) at n = "
    "64 over 600 steps instead of 150, with ten seeds instead of three. The warm-up grows in "
    "proportion. A claim that holds here and not there only lacked steps and seeds. The control "
    "is standard with ntk's learning rates of the tables. It loses what standard has over ntk, "
    "so the tables' rates are why a rate below the best costs ntk less.",
    **settings_of(__name__),
    measure=fig_effective_language.measure,
    rows=rows,
    draw=draw,
)
