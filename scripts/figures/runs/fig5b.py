"""Figure 5b: loss against compute as depth grows, at alpha_L = 1 and 1/2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import curves, panels
from scripts.figures.runs import fig6
from scripts.figures.result import Data, Figure, Row, estimate, Settings, mean, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """See `curves.measure`, per alpha_L, the same run at the base depth."""
    by_alpha = {}
    depth = settings["base"]["depth"]
    for alpha in settings["alpha_l"]:
        less = depth ** (
            1 - alpha
        )  # by so much is the base's branch larger than at alpha_L = 1, were beta0 the same
        model = settings["model"]
        rule = {"alpha_l": alpha, "beta0": model["beta0"] / less, "rate": model["rate"] * less**2}
        measurement = curves.measure(
            "vit", settings, work.parent / "trained", ends=4.0 / less**2, **rule
        )
        by_alpha[f"{alpha:g}"] = curves.slim(measurement)
    return by_alpha


def rows(settings: Settings, data: Data) -> list[Row]:
    """The difference of the two rules at each depth."""
    first, second = data
    table = []
    for when, window in (
        ("mean over all steps", slice(None)),
        ("last tenth of the steps", slice(-5, None)),
    ):
        losses = [
            np.asarray(data[name]["depth"]["loss"])[:, :, window].mean(-1)
            for name in (first, second)
        ]
        for size, one, other in zip(data[first]["depth"]["size"], *losses, strict=True):
            interval = mean(one - other)
            same = size == settings["base"]["depth"]
            comparison = (
                f"The paper has alpha_L = {first} better at large L. {_words(*interval[1:])}"
            )
            what = f"loss at alpha_L = {first} minus loss at {second}, L = {size}, {when}"
            note = "The same run, by two rules." if same else comparison
            table.append(estimate(what, interval, note=note))
    return table


def _words(low: float, high: float) -> str:
    return (
        "No difference seen."
        if low <= 0 <= high
        else f"Here it is {'better' if high < 0 else 'worse'}."
    )


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """A panel per alpha_L."""
    del settings
    figure, axes = panels.row(len(data), "Figure 5b: loss against training FLOPs as depth grows")
    for one, name in zip(axes, data, strict=True):
        curves.draw_losses(one, "depth", data[name]["depth"], compute=True)
        panels.label(one, rf"$\alpha_L$ = {name}", "training FLOPs", "nats", legend=True)
        one.set_ylim(*_limits(data))
    return figure


def _limits(data: Data) -> tuple[float, float]:
    every = np.concatenate([np.mean(of["depth"]["loss"], 1).ravel() for of in data.values()])
    return float(every.min()) - 0.05, float(every.max()) + 0.05


FIGURE = Figure(
    title="Figure 5b: loss against compute in depth",
    source="figure 5b of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Training loss of the paper's ViT on the endless image set against training FLOPs, as depth "
    "grows from one base model by either rule. At the base, branches and all learning rates are "
    "the same under both rules. The paper's two runs have other widths and learning rates.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
