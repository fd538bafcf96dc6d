"""Figure 12: loss of language models against compute as N, H or L grows, at alpha_A = 1 and 1/2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import curves, panels
from scripts.figures.runs import fig7
from scripts.figures.result import Data, Figure, Row, estimate, Settings, mean, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """See `curves.measure`, per alpha_A; the runs at alpha_A = 1 are those of figure 7."""
    rules = {f"{alpha:g}": {"alpha_a": alpha} for alpha in settings["alpha_a"]}
    return {
        name: curves.slim(curves.measure("lm", settings, work.parent / "trained", **rule))
        for name, rule in rules.items()
    }


def rows(settings: Settings, data: Data) -> list[Row]:
    """Which alpha_A is better as N grows, and which dimension is at a compute that all largest models had."""
    first, second = data
    table = []
    for axis in settings["axes"]:
        one, other = (
            np.asarray(data[name][axis]["loss"])[-1, :, -5:].mean(-1) for name in (first, second)
        )
        measured, low, high = mean(one - other)
        size = f"{curves.AXES[axis]} = {data[first][axis]['size'][-1]}"
        table.append(
            estimate(
                f"loss at alpha_A = {first} minus loss at {second}, {size}, last tenth of the steps",
                (measured, low, high),
                note="The paper's text has alpha_A = 1/2 better in N, the caption alpha_A = 1. "
                + _words(low, high, first, second),
            )
        )
    budget = min(
        data[first][axis]["steps"][-1] * data[first][axis]["flops"][-1] for axis in settings["axes"]
    )
    for name in data:
        for axis in settings["axes"]:
            interval = mean(curves.at_compute(data[name][axis], -1, budget))
            size = f"{curves.AXES[axis]} = {data[name][axis]['size'][-1]}"
            what = f"loss after {budget:.1e} training FLOPs, alpha_A = {name}, {size}"
            table.append(estimate(what, interval))
    return table


def _words(low: float, high: float, first: str, second: str) -> str:
    if low <= 0 <= high:
        return "No difference seen."
    return f"Here alpha_A = {first if high < 0 else second} is better."


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """A panel per dimension; lines of alpha_A = 1 are whole, of 1/2 dashed."""
    axes_of = settings["axes"]
    figure, axes = panels.row(len(axes_of), "Figure 12: loss against training FLOPs, Adam")
    for one, axis in zip(axes, axes_of, strict=True):
        for name, style, alpha in zip(
            data, ("-", "--"), (0.4, 1.0), strict=False
        ):  # both lie on one another
            suffix = rf", $\alpha_A$ = {float(name):g}"
            curves.draw_losses(
                one, axis, data[name][axis], compute=True, style=style, suffix=suffix, alpha=alpha
            )
        title = rf"{curves.AXES[axis]} growing; $\alpha_A$ = " + " whole, ".join(data) + " dashed"
        panels.label(
            one, title, "training FLOPs", "nats" if axis == axes_of[0] else "", legend=True
        )
    return figure


FIGURE = Figure(
    title="Figure 12: loss against compute by dimension",
    source="figure 12 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Losses against training FLOPs of the runs of figure 7, and of the same runs at alpha_A = "
    "1/2. The FLOPs include the frozen initial network of the centred output.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
