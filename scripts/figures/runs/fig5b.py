"""Figure 5b: loss against compute as depth grows, at two alpha_L."""

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
    """Train ViTs of growing depth, and return their losses.

    At the base depth the runs are the same under every alpha_L.

    Returns:
        alpha_L to the result of `curves.measure`, without kernels and attention.
    """
    by_alpha = {}
    depth = settings["base"]["depth"]
    model = settings["model"]
    for alpha in settings["alpha_l"]:
        # With equal beta0, the base's branches would be larger by this factor than at alpha_L = 1.
        factor = depth ** (1 - alpha)
        rule = {
            "alpha_l": alpha,
            "beta0": model["beta0"] / factor,
            "rate": model["rate"] * factor**2,
        }
        folder = work.parent / "trained"
        measured = curves.measure("vit", settings, folder, ends=4.0 / factor**2, **rule)
        by_alpha[f"{alpha:g}"] = curves.slim(measured)
    return by_alpha


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows with the loss at one alpha_L less that at the other, at every depth."""
    first, second = data
    sizes = data[first]["depth"]["size"]
    table = []
    for period, window in (
        ("mean over all steps", slice(None)),
        ("last tenth of the steps", slice(-5, None)),
    ):
        first_losses = np.asarray(data[first]["depth"]["loss"])[:, :, window].mean(-1)
        second_losses = np.asarray(data[second]["depth"]["loss"])[:, :, window].mean(-1)
        for index, size in enumerate(sizes):
            interval = mean(first_losses[index] - second_losses[index])
            if size == settings["base"]["depth"]:
                note = "The same run, by two rules."
            else:
                paper = f"The paper has alpha_L = {first} better at large L."
                note = f"{paper} {_comparison(interval)}"
            description = f"loss at alpha_L = {first} minus loss at {second}, L = {size}, {period}"
            table.append(estimate(description, interval, note=note))
    return table


def _comparison(interval: Interval) -> str:
    """Return in words whether a difference of losses is below or above 0."""
    _, low, high = interval
    if low <= 0 <= high:
        return "No difference seen."
    return f"Here it is {'better' if high < 0 else 'worse'}."


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for every alpha_L, all on the same loss axis."""
    del settings
    figure, axes = panels.row(len(data), "Figure 5b: loss against training FLOPs as depth grows")
    for panel, name in zip(axes, data, strict=True):
        curves.draw_losses(panel, "depth", data[name]["depth"], compute=True)
        panels.label(panel, rf"$\alpha_L$ = {name}", "training FLOPs", "nats", legend=True)
        panel.set_ylim(*_limits(data))
    return figure


def _limits(data: Data) -> tuple[float, float]:
    """Return limits of the loss axis that show all means over seeds."""
    means = [np.mean(of_alpha["depth"]["loss"], 1).ravel() for of_alpha in data.values()]
    losses = np.concatenate(means)
    return float(losses.min()) - 0.05, float(losses.max()) + 0.05


FIGURE = Figure(
    title="Figure 5b: loss against compute in depth",
    source="figure 5b of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Training loss of Bordelon et al.'s ViT against training FLOPs on rendered shapes, as "
    "the number of blocks L grows from 2 to 8. Relative to one model with 2 blocks, branches shrink "
    "as 1/L (alpha_L = 1) or 1/L^(1/2) (alpha_L = 1/2).\n\n"
    "At the base, branches and all learning rates are the same under both rules. The "
    "paper's two runs have other widths and learning rates.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
