"""Figure 3a: convergence of the initial residual kernel as heads are added at fixed N."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.initialization import finite_kernels
from scripts.figures.initialization.finite_kernels import ENDS
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure how far residual kernels are from the limit of many heads (`kernels.py`).

    Shapes have the four pairs of exponents of `ENDS`, numbers of heads H, and L blocks.

    Returns:
        `squared` [pairs, H, seeds]: squared errors relative to the limit. `products`
        [pairs, seeds, seeds]: products of two seeds' errors, of the widest models. `by_layer`
        [pairs, H, L + 1, 2] and `limit` [pairs, L + 1, 2]: means of the kernels' entries on and off
        the diagonal, of models and of the limit.
    """
    del work
    limit = finite_kernels.limits(settings, settings["head_dim"])
    squared = []
    by_layer = []
    products = np.array([])
    for heads in settings["heads"]:
        model_kernels = finite_kernels.finite(settings, settings["head_dim"], heads)
        products = finite_kernels.products(model_kernels, limit)
        squared.append(finite_kernels.squared(products))
        by_layer.append(finite_kernels.sums(model_kernels.mean(axis=1)))
    return {
        "squared": np.stack(squared, axis=1),
        "products": products,
        "by_layer": np.stack(by_layer, axis=1),
        "limit": finite_kernels.sums(limit),
    }


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return two rows for each pair of exponents (alpha_A, alpha_L).

    They have the exponent in H of the squared error, predicted as -1, and the error of the widest
    models' mean kernel, predicted as 0.
    """
    table = []
    for ends, squared in zip(ENDS, data["squared"], strict=True):
        description = f"squared error of the residual kernel against H, {finite_kernels.name(ends)}"
        table.append(
            exponent(description, settings["heads"], squared, predicted=-1.0, tolerance=0.15)
        )
    widest = (
        f"{settings['seeds']} models of H = {settings['heads'][-1]}, N = {settings['head_dim']}"
    )
    for ends, products in zip(ENDS, data["products"], strict=True):
        pair = finite_kernels.name(ends)
        description = f"distance of the mean kernel of {widest}, {pair}, from the recursion"
        table.append(finite_kernels.of_mean(description, products, source="recursion at this N"))
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw squared errors against H, and kernels by layer with the recursion's."""
    figure, (left, middle, right) = panels.row(3, "The initial residual kernel as heads are added")
    for color, ends, squared in zip(panels.COLORS, ENDS, data["squared"], strict=False):
        name = finite_kernels.title(ends)
        panels.power_law(left, settings["heads"], squared, name, color=color, predicted=-1.0)
    panels.label(
        left, "Dashed: slope −1", "heads H", "squared error over the limit's square", legend=True
    )
    for axes, alpha_l in ((middle, 1.0), (right, 0.5)):
        panels.by_layer(axes, ENDS, settings["heads"], data, alpha_l)
    panels.label(middle, r"Mean diagonal at $\alpha_L$ = 1", "block", r"$H^\ell$")
    panels.label(right, r"Mean diagonal at $\alpha_L$ = 1/2", "block", r"$H^\ell$")
    return figure


FIGURE = Figure(
    title="Figure 3a: the initial residual kernel as heads are added",
    source="figure 3a of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Inner products of the residual stream between positions, after the last block of "
    "Bordelon et al.'s ViT at initialization. Their squared error against the limit of infinitely "
    "many heads (`scripts/figures/initialization/kernels.py`) is predicted to fall as 1/heads.\n\n"
    "Heads have dimension N = 4, and there are 8 blocks. The kernel is over all positions "
    "of a few digits.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
