"""The kernel recursion for N and H to infinity, held against models whose heads and head dimension grow together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import finite_kernels, panels
from scripts.figures.finite_kernels import ENDS
from scripts.figures.result import Data, Figure, Row, Settings

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Products of errors [pairs, N, seeds, seeds], the same against the limit of the other alpha_A, and sums by layer."""
    del work
    limit = finite_kernels.limits(settings, None)
    wrong = limit[[ENDS.index((1.5 - alpha_a, alpha_l)) for alpha_a, alpha_l in ENDS]]
    products, controls, by_layer = [], [], []
    for size in settings["size"]:
        found = finite_kernels.finite(settings, size, size)
        products.append(finite_kernels.products(found, limit))
        controls.append(finite_kernels.products(found, wrong))
        by_layer.append(finite_kernels.sums(found.mean(axis=1)))
    stacked = {"products": products, "controls": controls, "by_layer": by_layer}
    return {**{name: np.stack(one, axis=1) for name, one in stacked.items()}, "limit": finite_kernels.sums(limit)}


def rows(settings: Settings, data: Data) -> list[Row]:
    """The error of the widest models' mean at both ends of both exponents, and against the wrong limit."""
    size = settings["size"][-1]
    models = f"distance of the mean kernel of {settings['seeds']} models of H = N = {size}"
    found = []
    for ends, products in zip(ENDS, data["products"], strict=True):
        smallest = finite_kernels.of_mean("", products[0]).measured
        note = f"At H = N = {settings['size'][0]} it is {smallest:.2g}."
        found.append(
            finite_kernels.of_mean(
                f"{models}, {finite_kernels.name(ends)}, from the recursion", products[-1], note=note
            )
        )
    for ends, controls in zip(ENDS, data["controls"], strict=True):
        other = f"{models}, {finite_kernels.name(ends)}, from the recursion of alpha_A = {1.5 - ends[0]:g}"
        found.append(finite_kernels.of_mean(other, controls[-1], control=True))
    return found


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Distances against the size, and the kernel by layer beside the recursion."""
    figure, (left, middle, right) = panels.row(3, "The residual kernel as N and H go to infinity together")
    for color, ends, products in zip(panels.COLORS, ENDS, data["products"], strict=False):
        means = [[finite_kernels.of_mean("", one).measured] for one in products]
        panels.power_law(left, settings["size"], means, finite_kernels.title(ends), color=color)
    left.axhline(0.03, color=panels.GREY, linewidth=1.0, linestyle=":")
    panels.label(left, "Dotted: 3 %", "N = H", "distance of the mean kernel over the limit")
    panels.legend(left)
    for axes, alpha_l in ((middle, 1.0), (right, 0.5)):
        panels.by_layer(axes, ENDS, settings["size"], data, alpha_l)
    panels.label(middle, r"Mean diagonal at $\alpha_L$ = 1", "block", r"$H^\ell$")
    panels.label(right, r"Mean diagonal at $\alpha_L$ = 1/2", "block", r"$H^\ell$")
    return figure


FIGURE = Figure(
    title="The residual kernel of the infinite limit, and of finite models",
    source="the kernel recursion at initialization, from section 2.1 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712), derived here",
    about="Models as in figure 3a with N = H growing, against the limit of both that `presets/kernels.py` computes: uniform attention "
    "at alpha_A = 1, Gaussian logits at 1/2. Distances are root mean squares over all pairs of positions.",
    small={"size": [4, 8, 16, 32], "depth": 8, "beta0": 4.0, "images": 2, "seeds": 24, "samples": 4000},
    full={"size": [4, 8, 16, 32, 64], "depth": 8, "beta0": 4.0, "images": 4, "seeds": 32, "samples": 64000},
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
