"""Residual kernels of models whose N and H grow together, against the limit of infinite N and H."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.initialization import finite_kernels
from scripts.figures.initialization.finite_kernels import ENDS
from scripts.figures.result import Data, Figure, Row, Settings, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure how far residual kernels are from the limit of infinite N and H (`kernels.py`).

    Shapes have the four pairs of exponents of `ENDS`, sizes N = H, and L blocks.

    Returns:
        `squared` [pairs, N, seeds]: squared errors relative to the limit. `products`
        [pairs, seeds, seeds]: products of two seeds' errors, of the widest models. `controls`: the
        same for errors from the limit of the other alpha_A. `by_layer` [pairs, N, L + 1, 2] and
        `limit` [pairs, L + 1, 2]: means of the kernels' entries on and off the diagonal, of models
        and of the limit.
    """
    del work
    limit = finite_kernels.limits(settings, None)
    # Both ends of alpha_A add up to 1.5.
    wrong = limit[[ENDS.index((1.5 - alpha_a, alpha_l)) for alpha_a, alpha_l in ENDS]]
    squared = []
    by_layer = []
    products = np.array([])
    controls = np.array([])
    for size in settings["size"]:
        model_kernels = finite_kernels.finite(settings, size, size)
        products = finite_kernels.products(model_kernels, limit)
        controls = finite_kernels.products(model_kernels, wrong)
        squared.append(finite_kernels.squared(products))
        by_layer.append(finite_kernels.sums(model_kernels.mean(axis=1)))
    return {
        "squared": np.stack(squared, axis=1),
        "products": products,
        "controls": controls,
        "by_layer": np.stack(by_layer, axis=1),
        "limit": finite_kernels.sums(limit),
    }


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows on the distance of the widest models' mean kernel from the limit.

    There is one for each pair of exponents (alpha_A, alpha_L), predicted as 0, and as a control one
    for the distance from the limit of the other alpha_A.
    """
    smallest = settings["size"][0]
    largest = settings["size"][-1]
    distance = f"distance of the mean kernel of {settings['seeds']} models of H = N = {largest}"
    table = []
    for ends, products, squared in zip(ENDS, data["products"], data["squared"], strict=True):
        note = f"Squared, for one model of H = N = {smallest}: {np.mean(squared[0]):.2g}."
        description = f"{distance}, {finite_kernels.name(ends)}, from the recursion"
        table.append(finite_kernels.of_mean(description, products, note=note))
    for ends, controls in zip(ENDS, data["controls"], strict=True):
        wrong = f"the recursion of alpha_A = {1.5 - ends[0]:g}"
        description = f"{distance}, {finite_kernels.name(ends)}, from {wrong}"
        table.append(finite_kernels.of_mean(description, controls, control=True))
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw squared errors against the size, and kernels by layer with the recursion's."""
    title = "The residual kernel as N and H go to infinity together"
    figure, (left, middle, right) = panels.row(3, title)
    for color, ends, squared in zip(panels.COLORS, ENDS, data["squared"], strict=False):
        panels.power_law(left, settings["size"], squared, finite_kernels.title(ends), color=color)
    panels.label(
        left,
        "Every model's distance from the recursion",
        "N = H",
        "squared error over the limit's square",
        legend=True,
    )
    for axes, alpha_l in ((middle, 1.0), (right, 0.5)):
        panels.by_layer(axes, ENDS, settings["size"], data, alpha_l)
    panels.label(middle, r"Mean diagonal at $\alpha_L$ = 1", "block", r"$H^\ell$")
    panels.label(right, r"Mean diagonal at $\alpha_L$ = 1/2", "block", r"$H^\ell$")
    return figure


FIGURE = Figure(
    title="The residual kernel of the infinite limit, and of finite models",
    source="a recursion derived here from section 2.1 of Bordelon, Chaudhry and Pehlevan 2024 "
    "(arXiv 2405.15712)",
    about="Inner products of the residual stream between positions at initialization, in the ViT "
    "of figure 3a, are compared with their limit as head dimension N and number of heads H grow together.\n\n"
    "In this limit attention is uniform for logits q.k/N (alpha_A = 1), and logits are Gaussian "
    "for q.k/N^(1/2) (alpha_A = 1/2). "
    "Distances are root mean squares over all pairs of positions.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
