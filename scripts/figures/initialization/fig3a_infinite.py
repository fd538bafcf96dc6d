"""The kernel recursion for N and H to infinity, held against models whose heads and head dimension grow together."""

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
    """Squared errors [pairs, N, seeds], sums by layer, and products of the widest, against the limit and the other alpha_A's."""
    del work
    limit = finite_kernels.limits(settings, None)
    wrong = limit[[ENDS.index((1.5 - alpha_a, alpha_l)) for alpha_a, alpha_l in ENDS]]
    squared, by_layer, products, controls = [], [], np.array([]), np.array([])
    for size in settings["size"]:
        model_kernels = finite_kernels.finite(settings, size, size)
        products, controls = (finite_kernels.products(model_kernels, one) for one in (limit, wrong))
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
    """The error of the widest models' mean at both ends of both exponents, and against the wrong limit."""
    size = settings["size"][-1]
    models = f"distance of the mean kernel of {settings['seeds']} models of H = N = {size}"
    table = []
    for ends, products, squared in zip(ENDS, data["products"], data["squared"], strict=True):
        note = (
            f"Squared, for one model of H = N = {settings['size'][0]}: {np.mean(squared[0]):.2g}."
        )
        table.append(
            finite_kernels.of_mean(
                f"{models}, {finite_kernels.name(ends)}, from the recursion", products, note=note
            )
        )
    for ends, controls in zip(ENDS, data["controls"], strict=True):
        other = f"{models}, {finite_kernels.name(ends)}, from the recursion of alpha_A = {1.5 - ends[0]:g}"
        table.append(finite_kernels.of_mean(other, controls, control=True))
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Squared errors against the size, and the kernel by layer beside the recursion."""
    figure, (left, middle, right) = panels.row(
        3, "The residual kernel as N and H go to infinity together"
    )
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
    source="the kernel recursion at initialization, from section 2.1 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712), derived here",
    about="Models as in figure 3a with N = H growing, against the limit of infinite N and H. "
    "`scripts/figures/initialization/kernels.py` computes the limit: attention is uniform at "
    "alpha_A = 1, and its logits are Gaussian at 1/2. Distances are root mean squares over all "
    "pairs of positions.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
