"""Figure 12: loss of language models against compute as N, H or L grows, at two alpha_A."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import curves, panels
from scripts.figures.result import (
    Data,
    Figure,
    Interval,
    Row,
    Settings,
    estimate,
    mean,
    settings_of,
)

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train language models of all sizes, and return their losses.

    The runs at alpha_A = 1 are shared with figure 7.

    Returns:
        alpha_A to the result of `curves.measure`, without kernels and attention.
    """
    by_alpha = {}
    for alpha in settings["alpha_a"]:
        measured = curves.measure("lm", settings, work.parent / "trained", alpha_a=alpha)
        by_alpha[f"{alpha:g}"] = curves.slim(measured)
    return by_alpha


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows on the losses of the largest models, without predictions.

    For each dimension (N, H or L), a row has the loss at the first alpha_A less that at the second.
    Other rows have the losses after equal training FLOPs: the most that all of these models had.
    """
    first, second = data
    table = []
    for axis in settings["axes"]:
        losses = []
        for name in (first, second):
            of_largest = np.asarray(data[name][axis]["loss"])[-1]
            losses.append(of_largest[:, -5:].mean(-1))
        interval = mean(losses[0] - losses[1])
        size = f"{curves.AXES[axis]} = {data[first][axis]['size'][-1]}"
        description = (
            f"loss at alpha_A = {first} minus loss at {second}, {size}, last tenth of the steps"
        )
        paper = "The paper's text has alpha_A = 1/2 better in N, the caption alpha_A = 1."
        note = f"{paper} {_comparison(interval, first, second)}"
        table.append(estimate(description, interval, note=note))

    budgets = []
    for axis in settings["axes"]:
        budgets.append(data[first][axis]["steps"][-1] * data[first][axis]["flops"][-1])
    budget = min(budgets)
    for name in data:
        for axis in settings["axes"]:
            interval = mean(curves.at_compute(data[name][axis], -1, budget))
            size = f"{curves.AXES[axis]} = {data[name][axis]['size'][-1]}"
            description = f"loss after {budget:.1e} training FLOPs, alpha_A = {name}, {size}"
            table.append(estimate(description, interval))
    return table


def _comparison(interval: Interval, first: str, second: str) -> str:
    """Return in words which of two alpha_A is better.

    Args:
        interval: Loss at the first alpha_A less that at the second.
    """
    _, low, high = interval
    if low <= 0 <= high:
        return "No difference seen."
    return f"Here alpha_A = {first if high < 0 else second} is better."


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for every dimension, with alpha_A = 1 as full lines and 1/2 as dashed ones."""
    axis_names = settings["axes"]
    figure, axes = panels.row(len(axis_names), "Figure 12: loss against training FLOPs, Adam")
    for panel, axis in zip(axes, axis_names, strict=True):
        # Full lines are faint, because both lie on one another.
        for name, style, alpha in zip(data, ("-", "--"), (0.4, 1.0), strict=False):
            curves.draw_losses(
                panel,
                axis,
                data[name][axis],
                compute=True,
                style=style,
                suffix=rf", $\alpha_A$ = {float(name):g}",
                alpha=alpha,
            )
        exponents = " whole, ".join(data)
        title = rf"{curves.AXES[axis]} growing; $\alpha_A$ = {exponents} dashed"
        loss_name = "nats" if axis == axis_names[0] else ""
        panels.label(panel, title, "training FLOPs", loss_name, legend=True)
    return figure


FIGURE = Figure(
    title="Figure 12: loss against compute by dimension",
    source="figure 12 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Training loss against training FLOPs of the decoder of [figure "
    "7](#figure-7-language-models-under-adam-as-n-h-and-l-grow), with attention logits q.k/N "
    "(alpha_A = 1) or q.k/N^(1/2) (alpha_A = 1/2), where N is the head dimension.\n\n"
    "The FLOPs include the frozen initial network of the centred output.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
