"""Kernels of a deep linear net after one step of gradient descent, which have an exact limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.initialization import linear_net
from scripts.figures.result import Data, Figure, Row, Settings, estimate, mean, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure the kernels of every layer after one step.

    Returns:
        `kernels`: depth L to kernels [seeds, L] of all layers. `without_response`: the same for the
        control, whose updates do not respond to the weights (see `linear_net.one_step`).
    """
    del work
    kernels = {}
    without_response = {}
    for depth in settings["depth"]:
        kernels[str(depth)] = _nets(settings, depth, settings["seeds"], response=True)
        without_response[str(depth)] = _nets(settings, depth, 8, response=False)
    return {"kernels": kernels, "without_response": without_response}


def _nets(settings: Settings, depth: int, seeds: int, *, response: bool) -> np.ndarray:
    """Return kernels [seeds, L] of nets of one depth after one step."""
    rngs = np.random.default_rng([depth, response]).spawn(seeds)
    kernels = []
    for rng in rngs:
        kernels.append(
            linear_net.one_step(depth, settings["width"], settings["rate"], rng, response=response)
        )
    return np.stack(kernels)


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the last layer's kernel with its exact limit, a row and a control for each depth."""
    table = []
    for control, name in ((False, "kernels"), (True, "without_response")):
        for depth in settings["depth"]:
            last_kernels = np.asarray(data[name][str(depth)])[:, -1]
            predicted = float(linear_net.limit(np.array(depth), settings["rate"]))
            description = f"kernel of the last of {depth} layers after one step"
            note = ""
            if control:
                description += ", without response terms"
                without_response = 1 + settings["rate"] ** 2 * depth
                note = f"Without response terms theory has {without_response:.2f}."
            table.append(
                estimate(
                    description,
                    mean(last_kernels),
                    predicted=predicted,
                    tolerance=0.02 * predicted,
                    control=control,
                    note=note,
                )
            )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw kernels by layer with their limit, in a panel for every depth."""
    figure, axes = panels.row(len(settings["depth"]), "A deep linear net after one step")
    for panel, depth in zip(axes, settings["depth"], strict=True):
        layers = np.arange(1, depth + 1)
        limit = linear_net.limit(layers, settings["rate"])
        measured = np.asarray(data["kernels"][str(depth)]).mean(axis=0)
        control = np.asarray(data["without_response"][str(depth)]).mean(axis=0)
        panel.plot(layers, limit, "--", color=panels.GREY, label="limit")
        name = f"nets of width {settings['width']:,}"
        panel.plot(layers, measured, "o", color=panels.BLUE, label=name)
        name = "without response terms"
        panel.plot(layers, control, "s", color=panels.ORANGE, markersize=4, label=name)
        panels.label(panel, f"L = {depth}", r"layer $\ell$", r"$|h^\ell|^2 / N$", legend=True)
    return figure


FIGURE = Figure(
    title="A deep linear net's kernels after one step",
    source="the kernel 1 + (eta gamma0)^2 l(l+1)(2l+1)/6 of layer l, from the mean-field dynamics "
    "of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="This kernel is |h|^2/N of the last layer h of a linear net of width N, after one step on "
    "one example. The learning rate is eta gamma0^2 N, the readout has the factor 1/(gamma0 N), and "
    "eta gamma0 = 0.1.\n\n"
    "Products with its matrices are drawn from their exact law, so that N can be large. A "
    "control has updates that do not point along the backward signal.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
