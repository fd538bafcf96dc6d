"""The Brownian term: movement of the residual stream over the blocks at initialization."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.studies.infinite.command import patches
from scripts.figures import models, panels
from scripts.figures.initialization import kernels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure how far the residual stream moves from the embedding to the last block.

    Returns:
        `moved` [alpha_L, L, seeds]: mean squared movement |h^(L+1) - h^1|^2 / D in models of L
        blocks. `limit` [alpha_L, L]: the same for infinite N and H, by the recursion of
        `kernels.py`.
    """
    del work
    import jax
    import jax.numpy as jnp

    from mupax.train.studies.check.observables import internals

    images = models.images(settings["images"])
    first = kernels.input_kernel(patches(images, 2))
    inputs = jnp.asarray(images)

    def look(model: Any) -> jax.Array:
        activations = internals(model, inputs)
        return jnp.mean(jnp.square(activations["residual"][-1] - activations["embedding"]))

    alphas = settings["alpha_l"]
    beta0 = settings["beta0"]
    presets = [models.absolute(alpha_a=1.0, alpha_l=alpha, beta0=beta0) for alpha in alphas]
    moved = []
    limit = []
    for depth in settings["depth"]:
        config = models.vit(head_dim=settings["head_dim"], heads=settings["heads"], depth=depth)
        program = models.at_initialization(config, look)
        moved.append(np.transpose([program(seed, presets) for seed in range(settings["seeds"])]))
        limit_by_alpha = []
        for alpha in alphas:
            layers = kernels.residual_kernels(
                first, depth=depth, alpha_a=1.0, alpha_l=alpha, beta0=beta0
            ).layers
            # Branches are uncorrelated with the embedding, so the kernel grows by the movement.
            limit_by_alpha.append(np.einsum("xsxs->xs", layers[-1] - layers[0]).mean())
        limit.append(limit_by_alpha)
    return {"moved": np.stack(moved, axis=1), "limit": np.transpose(limit)}


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the movement's exponent in the depth with 1 - 2 alpha_L, a row for each alpha_L."""
    movement = "squared movement of the residual stream over all blocks"
    table = []
    for alpha, moved in zip(settings["alpha_l"], data["moved"], strict=True):
        description = f"{movement} against L, alpha_L = {alpha:g}"
        table.append(exponent(description, settings["depth"], moved, predicted=1 - 2 * alpha))
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw movements against L, with the recursion's as crosses."""
    figure, (axes,) = panels.row(1, "How far the residual stream moves at initialization")
    figure.set_size_inches(6.0, 4.4)
    depths = settings["depth"]
    for color, alpha, moved, limit in zip(
        panels.COLORS, settings["alpha_l"], data["moved"], data["limit"], strict=False
    ):
        panels.power_law(
            axes, depths, moved, rf"$\alpha_L$ = {alpha:g}", color=color, predicted=1 - 2 * alpha
        )
        axes.plot(depths, limit, "x", color=panels.INK, markersize=7, zorder=4)
    axes.plot([], [], "x", color=panels.INK, label="recursion, N and H infinite")
    panels.label(
        axes, r"Dashed: slope $1 - 2\alpha_L$", "blocks L", r"$|h^{L+1} - h^1|^2 / D$", legend=True
    )
    return figure


FIGURE = Figure(
    title="The Brownian term: how far the residual stream moves over the blocks at initialization",
    source="the limit of depth in Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Squared difference between the residual stream after and before the L blocks of the "
    "paper's ViT on digits, at initialization. With branches times 1/L^alpha_L the difference is "
    "predicted to scale as L^(1 - 2 alpha_L).\n\n"
    "So the difference survives at alpha_L = 1/2 and vanishes at 1 as L grows.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
