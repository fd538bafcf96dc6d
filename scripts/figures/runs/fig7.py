"""Figure 7: losses, kernels and attention of language models under Adam as N, H and L grow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.figures import curves
from scripts.figures.result import Data, Figure, Row, Settings, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Return what `curves.measure` returns for language models."""
    return curves.measure("lm", settings, work.parent / "trained")


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows on how alike the largest models are, without predictions.

    The paper shows curves and gives no number.
    """
    del settings
    return curves.likeness(data)


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw losses, kernels and attention, with a column for every dimension."""
    return curves.panels_of("Figure 7: decoder under Adam", data, settings["axes"])


FIGURE = Figure(
    title="Figure 7: language models under Adam as N, H and L grow",
    source="figure 7 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Training loss, and the last layer's feature kernel and attention logits, of Bordelon et "
    "al.'s decoder on the bytes of Python's sources (theirs: C4), as head dimension N, heads H or "
    "blocks L grow fourfold.\n\n"
    "Attention logits are q.k/N and branches shrink as 1/L (alpha_A = alpha_L = 1). The "
    "kernel is over the last positions of a text never trained on.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
