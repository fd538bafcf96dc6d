"""Loss against learning rate at every size of a cell: the README's picture.

`mup` keeps the constants of the base. `sp` has its other constants searched again at every size.
The picture shows both on one scale.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.run.report.plotting import INK, ORANGE
from scripts.quality.cells import STEP, Arm, Cell, rate
from scripts.quality.descent import Setting, setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scripts.quality.measuring import Measuring

OFFSETS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
"""Octaves from an arm's own rate at which its curves are measured."""
SEEDS = 2
"""Number of seeds of a curve's points. The marked point has all seeds of its comparison."""
ABOVE = 0.25
"""Nats that the picture shows above the least loss, in addition to the span of `mup`'s marks."""


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """Losses of one arm at one size against the learning rate.

    Attributes:
        size: Value of the cell's axis.
        width: Width of the model.
        log2_rates: log2 of the peak learning rates, ascending.
        losses: Mean final training loss at each rate, in nats; `None` where a seed diverged.
        marked_rate: log2 of the rate that the arm uses.
        marked_loss: Mean loss over all seeds at `marked_rate`.
    """

    size: int
    width: int
    log2_rates: list[float]
    losses: list[float | None]
    marked_rate: float
    marked_loss: float


def sizes_of(record: Mapping[str, Any], label: str) -> list[Mapping[str, Any]]:
    """Return the rows of an arm, one per size, from the content of a cell's result.json.

    Raises:
        LookupError: The cell has no arm with the label.
    """
    sizes = {arm["label"]: arm["sizes"] for arm in record["arms"]}
    if label not in sizes:
        raise LookupError(
            f"cell {record['cell']} has no arm {label!r}; its arms are {', '.join(sizes)}"
        )
    return sizes[label]


def _setting(octaves: Mapping[str, float]) -> Setting:
    """Return constants in octaves as a setting, which counts steps of the search."""
    return setting({name: round(value / STEP.get(name, 1.0)) for name, value in octaves.items()})


def measure(work: Measuring, arm: Arm, rows: Sequence[Mapping[str, Any]]) -> list[RateCurve]:
    """Train an arm at the rates around its own at every size, and return the curves.

    Args:
        rows: The arm's rows, one per size of the cell, with its setting and the losses of all seeds
            (`sizes_of`).
    """
    cell = work.cell
    steps = [round(offset / STEP["lr"]) for offset in OFFSETS]
    curves: list[RateCurve] = []
    for size, row in zip(cell.sizes, rows, strict=True):
        values = dict(_setting(row["octaves"]))
        moved = [setting({**values, "lr": values.get("lr", 0) + step}) for step in steps]
        configs = [cell.config(arm, size, dict(neighbour), 0) for neighbour in moved]
        losses = work.losses(arm, size, moved, SEEDS).mean(axis=1)
        marked = configs[OFFSETS.index(0.0)]
        curves.append(
            RateCurve(
                size=size,
                width=marked.model.sizes()["embed"],
                log2_rates=[round(rate(config), 4) for config in configs],
                losses=[float(f"{loss:.6g}") if math.isfinite(loss) else None for loss in losses],
                marked_rate=round(rate(marked), 4),
                marked_loss=float(f"{np.mean(row['losses']):.6g}"),
            )
        )
    return curves


def write(path: Path, cell: Cell, arms: Mapping[str, Sequence[RateCurve]]) -> None:
    """Write the curves of a cell as JSON.

    Args:
        arms: Label of an arm to its curves.
    """
    rows = {}
    for label, curves in arms.items():
        rows[label] = [dataclasses.asdict(curve) for curve in curves]
    record = {
        "cell": cell.name,
        "recipe": f"{cell.recipe} {cell.words}",
        "seeds": SEEDS,
        "arms": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> dict[str, list[RateCurve]]:
    """Return the curves in a file of `write`, by the labels of their arms."""
    arms = json.loads(path.read_text())["arms"]
    curves = {}
    for label, rows in arms.items():
        curves[label] = [RateCurve(**row) for row in rows]
    return curves


def draw(path: Path, left: Sequence[RateCurve], right: Sequence[RateCurve]) -> None:
    """Write a PNG with two panels on one scale.

    Args:
        left: Curves of `mup`, whose constants are those of the smallest size.
        right: Curves of `sp`, whose other constants were searched at every size.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharex=True, sharey=True))
    titles = (
        "mup: everything tuned once, at width 64",
        "sp: rate and other constants tuned anew at every width",
    )
    least = min(curve.marked_loss for curve in (*left, *right))
    for panel, curves, title in zip(panels, (left, right), titles, strict=True):
        _draw_panel(panel, curves)
        panel.set_title(title, fontsize=11, loc="left", color=INK)
        panel.set_xlabel("peak learning rate", fontsize=10)
    panels[0].axvline(
        left[0].marked_rate, color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=0
    )
    panels[0].set_ylabel("training loss after 800 steps (nats)", fontsize=10)
    # The left panel's smallest model must fit, whose loss is highest.
    spread = left[0].marked_loss - min(curve.marked_loss for curve in left)
    panels[0].set_ylim(least - 0.03, least + ABOVE + spread)
    figure.savefig(path, dpi=130, pil_kwargs={"optimize": True})


def _draw_panel(panel: Axes, curves: Sequence[RateCurve]) -> None:
    """Draw a curve per size, with a legend of widths and marked losses."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    for index, curve in enumerate(curves):
        color = colormaps["Blues"](0.4 + 0.6 * index / max(1, len(curves) - 1))
        losses = np.array([math.nan if loss is None else loss for loss in curve.losses])
        rates = np.array(curve.log2_rates)
        label = f"{curve.width}: {curve.marked_loss:.3f}"
        panel.plot(rates, losses, "o-", color=color, lw=1.8, ms=3.5, label=label)
        panel.plot(
            curve.marked_rate,
            curve.marked_loss,
            "o",
            ms=7,
            mfc=color,
            mec=ORANGE,
            mew=1.8,
            zorder=5,
        )
    # "best" is the corner that the curves leave free.
    legend = panel.legend(
        title="width: loss at the mark", loc="best", fontsize=9, title_fontsize=9, frameon=False
    )
    legend.set_alignment("left")
    panel.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    panel.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")
    panel.grid(color="#E6E6E6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors="#444444", labelsize=9)
