"""Figure 3a: how the initial residual kernel converges as heads are added, N fixed."""

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
    """Squared errors [pairs, H, seeds], products of the widest [pairs, seeds, seeds], and sums by layer, also of the limit."""
    del work
    limit = finite_kernels.limits(settings, settings["head_dim"])
    squared, by_layer, products = [], [], np.array([])
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
    """Per pair of exponents a slope in H, and the error of the widest models' mean."""
    table = [
        exponent(
            f"squared error of the residual kernel against H, {finite_kernels.name(ends)}",
            settings["heads"],
            one,
            predicted=-1.0,
            tolerance=0.15,
        )
        for ends, one in zip(ENDS, data["squared"], strict=True)
    ]
    widest = f"H = {settings['heads'][-1]}, N = {settings['head_dim']}"
    return table + [
        finite_kernels.of_mean(
            f"distance of the mean kernel of {settings['seeds']} models of {widest}, {finite_kernels.name(ends)}, from the recursion",
            products,
            source="recursion at this N",
        )
        for ends, products in zip(ENDS, data["products"], strict=True)
    ]


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Squared error against H, and the kernel by layer beside the recursion."""
    figure, (left, middle, right) = panels.row(3, "The initial residual kernel as heads are added")
    for color, ends, one in zip(panels.COLORS, ENDS, data["squared"], strict=False):
        panels.power_law(
            left, settings["heads"], one, finite_kernels.title(ends), color=color, predicted=-1.0
        )
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
    source="figure 3a of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712), whose own slopes are -1.04 and -1.15",
    about="The kernel h.h'/D after the last block of the paper's ViT with N = 4 and L = 8, against "
    "the limit of many heads that `scripts/figures/initialization/kernels.py` computes at this "
    "N. The kernel is over all positions of a few digits.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
