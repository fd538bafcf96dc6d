"""The residual-free case with an exact answer: a deep linear net's kernels after one step of gradient descent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.initialization import linear_net
from scripts.figures.result import Data, Figure, Row, Settings, mean, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Kernels by layer after one step, {depth: [seeds, L]}, and those without response terms."""
    del work

    def nets(depth: int, seeds: int, response: bool) -> np.ndarray:
        rngs = np.random.default_rng([depth, response]).spawn(seeds)
        hyperparameters = (depth, settings["width"], settings["rate"])
        return np.stack(
            [linear_net.one_step(*hyperparameters, rng, response=response) for rng in rngs]
        )

    return {
        "kernels": {
            str(depth): nets(depth, settings["seeds"], True) for depth in settings["depth"]
        },
        "without_response": {str(depth): nets(depth, 8, False) for depth in settings["depth"]},
    }


def rows(settings: Settings, data: Data) -> list[Row]:
    """Per depth the last layer's kernel, and the control."""
    table = []
    for control, name in ((False, "kernels"), (True, "without_response")):
        for depth in settings["depth"]:
            measured, low, high = mean(np.asarray(data[name][str(depth)])[:, -1])
            predicted = float(linear_net.limit(np.array(depth), settings["rate"]))
            what = f"kernel of the last of {depth} layers after one step" + (
                ", without response terms" * control
            )
            note = (
                f"Without response terms theory has {1 + settings['rate'] ** 2 * depth:.2f}."
                if control
                else ""
            )
            row = {
                "predicted": predicted,
                "tolerance": 0.02 * predicted,
                "kind": "value",
                "note": note,
            }
            table.append(
                Row(what=what, measured=measured, low=low, high=high, control=control, **row)
            )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Kernels by layer beside the limit."""
    figure, axes = panels.row(len(settings["depth"]), "A deep linear net after one step")
    for one, depth in zip(axes, settings["depth"], strict=True):
        layers = np.arange(1, depth + 1)
        measured = np.asarray(data["kernels"][str(depth)]).mean(axis=0)
        control = np.asarray(data["without_response"][str(depth)]).mean(axis=0)
        one.plot(
            layers,
            linear_net.limit(layers, settings["rate"]),
            "--",
            color=panels.GREY,
            label="limit",
        )
        one.plot(
            layers, measured, "o", color=panels.BLUE, label=f"nets of width {settings['width']:,}"
        )
        one.plot(
            layers, control, "s", color=panels.ORANGE, markersize=4, label="without response terms"
        )
        panels.label(one, f"L = {depth}", r"layer $\ell$", r"$|h^\ell|^2 / N$", legend=True)
    return figure


FIGURE = Figure(
    title="A deep linear net's kernels after one step",
    source="derived from the mean-field dynamics of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712): 1 + (eta gamma0)^2 l(l+1)(2l+1)/6",
    about="A linear net with the readout 1/(gamma0 N), one example and eta gamma0 = 0.1. Products "
    "with its matrices are drawn from their exact law, so that N can be large. A control has "
    "updates that do not point along the backward signal.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
