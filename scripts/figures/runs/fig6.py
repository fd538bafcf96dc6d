"""Figure 6: losses, kernels and attention of vision transformers under SGD as N, H and L grow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.figures import curves
from scripts.figures.result import Data, Figure, Row, Settings, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Return what `curves.measure` returns for vision transformers."""
    return curves.measure("vit", settings, work.parent / "trained")


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows on how alike the largest models are, without predictions.

    The paper shows curves and gives no number.
    """
    del settings
    return curves.likeness(data)


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw losses, kernels and attention, with a column for every dimension."""
    return curves.panels_of(
        "Figure 6: ViT under SGD with momentum, one pass", data, settings["axes"]
    )


FIGURE = Figure(
    title="Figure 6: vision transformers under SGD as N, H and L grow",
    source="figure 6 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Training loss, and the last layer's feature kernel and attention logits, of Bordelon et "
    "al.'s ViT on rendered shapes (theirs: CIFAR-5M), as head dimension N, heads H or blocks L "
    "grow fourfold.\n\n"
    "Attention logits are q.k/N and branches shrink as 1/L (alpha_A = alpha_L = 1). "
    "Features are means over positions, and the kernel is over images never trained on. The "
    "paper finds loss curves nearly equal in N and H, slower early at large L, and similar "
    "final kernels. The widest model here stands for the limit. The limit itself is of H at "
    "one N and L, and 250 steps on 64 new images of 16 positions are 64 x 16 x (2 x 250 - "
    "1) = 510,976 directions of a matrix, whose record needs a width of two million "
    "([presets.md](../concepts/presets.md#the-infinite-model) explains why).",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
