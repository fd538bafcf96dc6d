"""Figures 3b and 3c: attention logits over heads at initialization, for small and large N."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import models, panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure the variance of attention logits over heads, and their density at some N.

    Returns:
        `variance` [alpha_A, N, seeds]: mean over images and pairs of positions of the variance over
        heads. `density`: some N to the histogram [bins] of the logits over their standard
        deviation, at the first alpha_A.
    """
    del work
    import jax.numpy as jnp

    from mupax.train.studies.check.observables import internals

    images = jnp.asarray(models.images(settings["images"]))
    presets = [models.absolute(alpha_a=alpha, alpha_l=1.0) for alpha in settings["alpha_a"]]
    variance = np.zeros((len(presets), len(settings["head_dim"]), settings["seeds"]))
    density: dict[str, Any] = {}
    for index, head_dim in enumerate(settings["head_dim"]):
        config = models.vit(head_dim=head_dim, heads=settings["heads"], depth=1)
        program = models.at_initialization(
            config, lambda model: internals(model, images)["attention"][0]
        )
        first_image_logits = []
        for seed in range(settings["seeds"]):
            logits_BHTS_by_preset = program(seed, presets)
            for row, logits_BHTS in enumerate(logits_BHTS_by_preset):
                variance[row, index, seed] = logits_BHTS.var(axis=1, ddof=1).mean()
            first_image_logits.append(logits_BHTS_by_preset[0][0])  # [H, T, S]
        if head_dim in settings["shown"]:
            logits = np.concatenate(first_image_logits)
            # Every pair of positions has a variance of its own.
            ratios = logits / logits.std(axis=0)
            histogram, _ = np.histogram(ratios, bins=41, range=(-4.1, 4.1), density=True)
            density[str(head_dim)] = histogram
    return {"variance": variance, "density": density}


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the variance's exponent in N with 1 - 2 alpha_A, a row for each alpha_A."""
    table = []
    for alpha, variance in zip(settings["alpha_a"], data["variance"], strict=True):
        description = f"variance of attention logits over heads against N, alpha_A = {alpha:g}"
        table.append(exponent(description, settings["head_dim"], variance, predicted=1 - 2 * alpha))
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw densities of the logits over heads, and variances against N."""
    figure, (left, right) = panels.row(2, "Attention logits over heads at initialization")
    centers = np.linspace(-4.1, 4.1, 42)[:-1] + 0.1
    for color, (head_dim, density) in zip(panels.COLORS, data["density"].items(), strict=False):
        left.step(
            centers, density, where="mid", color=color, linewidth=1.4, label=f"N = {head_dim}"
        )
    gaussian = np.exp(-(centers**2) / 2) / np.sqrt(2 * np.pi)
    left.plot(centers, gaussian, "--", color=panels.GREY, label="Gaussian")
    panels.label(
        left,
        "Over heads and seeds, a pair of positions at a time",
        "logit / standard deviation",
        "density",
        legend=True,
    )
    for color, alpha, variance in zip(
        panels.COLORS, settings["alpha_a"], data["variance"], strict=False
    ):
        name = rf"$\alpha_A$ = {alpha:g}"
        panels.power_law(
            right, settings["head_dim"], variance, name, color=color, predicted=1 - 2 * alpha
        )
    panels.label(
        right,
        r"Dashed: slope $1 - 2\alpha_A$",
        "head dimension N",
        "variance over heads",
        legend=True,
    )
    return figure


FIGURE = Figure(
    title="Figures 3b and 3c: attention logits over heads at initialization",
    source="figure 3 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Attention logits q.k/N^alpha_A in the first block of Bordelon et al.'s ViT on digits, "
    "at initialization. Their variance over 16 heads is predicted to scale as N^(1 - 2 "
    "alpha_A) with the head dimension N.\n\n"
    "The picture also shows the distribution of the logits.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
