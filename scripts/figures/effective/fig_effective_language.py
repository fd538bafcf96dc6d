"""Figures 3 to 5 of Dinan, Yaida and Zhang 2023 on encoder-decoders that a CPU can train.

The figures show the cost of rates below the best, the least losses, and the gain by a larger model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.studies.transfer.drift import TOLERANCE, analyse
from mupax.train.studies.transfer.fit import STEP, Curve
from scripts.figures import panels, rates
from scripts.figures.effective import excess, strategies
from scripts.figures.result import Data, Figure, Row, Settings, mean, settings_of

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

    from mupax.train.config.run import Config

SAME = 0.02
"""Nats that count as no difference of losses: the spread of seeds at a best rate."""


def config(settings: Settings, strategy: str, width: int, hidden: float, seed: int) -> Config:
    """Return the run config of one point of the grid.

    Args:
        strategy: Strategy of `strategies.MAP` or a variant, a key of the settings' `grid`.
        width: Width `n`.
        hidden: Hidden rate `h`, see `strategies`.
        seed: Seed of the initialization. All points see the same batches.
    """
    from mupax.train.config.run import Config, DataConfig, OptimizerConfig
    from mupax.zoo import configs

    model = replace(
        configs.get("bart-large"),
        width=width,
        num_heads=width // settings["head_dim"],
        vocab_size=260,
        **settings["model"],
    )
    constant, power = settings["embeddings"].get(strategy, (1.0, 0.0))
    lr = strategies.peak_lr(strategy, width, hidden)
    return Config(
        recipe="figure",
        model=model,
        data=DataConfig(name="python_corpus", noise="infilling", seed=0, **settings["data"]),
        preset=strategies.language(strategy, width, constant * width**power),
        optimizer=OptimizerConfig(
            name="adamw",
            peak_lr=lr,
            weight_decay=settings["decay"] * hidden / lr,
            schedule="linear",
            **settings["optimizer"],
        ),
        steps=settings["steps"],
        seed=seed,
    )


def grid(settings: Settings, strategy: str, index: int) -> list[float]:
    """Return log2 of the hidden rates at which a width is trained, in half octaves.

    Args:
        settings: Settings of the figure. Their `grid` has the first and the last rate of every
            width, or `None` for a width that the strategy is not trained at.
        strategy: Key of the settings' `grid`.
        index: Index of the width in the settings' `width`.
    """
    ends = settings["grid"][strategy][index]
    if ends is None:
        return []
    low, high = ends
    return [low + STEP * n for n in range(round((high - low) / STEP) + 1)]


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train every strategy at every width over its grid of hidden rates, and return the losses.

    Args:
        work: Folder in which a sweep for each width keeps its runs. Finished runs are not repeated.

    Returns:
        Strategy to a dictionary for `rates.curves`, with lists over widths: log2 of the hidden
        rates `x` [rates], the training `losses` [rates][seeds], and the number of seeds `first`.
    """
    from mupax.train.studies.sweep.sweep import Sweep

    by_strategy: dict[str, Any] = {}
    for strategy in settings["grid"]:
        by_strategy[strategy] = {"x": [], "losses": [], "first": []}
    for index, (width, seeds) in enumerate(zip(settings["width"], settings["seeds"], strict=True)):
        configs = []
        for strategy in settings["grid"]:
            for log2_rate in grid(settings, strategy, index):
                for seed in range(seeds):
                    configs.append(config(settings, strategy, width, 2.0**log2_rate, seed))
        # The rows come in the order of the configs.
        rows = iter(Sweep(work / str(width), evaluated=False).run(configs))
        for strategy, study in by_strategy.items():
            log2_rates = grid(settings, strategy, index)
            losses = []
            for _ in log2_rates:
                losses.append([rates.kept_loss(next(rows).loss) for _ in range(seeds)])
            study["x"].append(log2_rates)
            study["losses"].append(losses)
            study["first"].append(seeds)
    return by_strategy


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return the rows of figures 3, 4 and 5, except those without a finite estimate.

    Figure 3 is about the cost of rates below the best, figure 4 about the least losses, and
    figure 5 about the gain by twice the width and the transfer of the rate.
    """
    widths = settings["width"]
    curves = {name: rates.curves(of_strategy) for name, of_strategy in data.items()}
    table = [
        *excess.rows("n", widths, curves, ["standard", "ntk", *settings["embeddings"]]),
        *least(widths, curves),
        *_wider(widths, curves),
        *_drifts(widths, curves),
    ]
    return [row for row in table if math.isfinite(row.measured)]


def least(widths: Sequence[int], curves: dict[str, list[Curve]]) -> list[Row]:
    """Return the rows of figure 4: ntk's least loss less standard's at every width.

    Args:
        widths: Widths `n`, ascending.
        curves: Strategy to its curves, one per width.
    """
    table = []
    for index, width in enumerate(widths):
        standard = excess.least(curves["standard"][index])
        ntk = excess.least(curves["ntk"][index])
        note = (
            f"Standard {standard.mean():.3f}, ntk {ntk.mean():.3f} nats; "
            "the paper (n = 1024, one seed each): 0.967 and 0.971."
        )
        table.append(
            excess.value(
                f"least loss, ntk minus standard, n = {width}",
                ntk - standard,
                predicted=0.0,
                tolerance=SAME,
                source="figure 4",
                note=note,
            )
        )
    return table


def _wider(widths: Sequence[int], curves: dict[str, list[Curve]]) -> list[Row]:
    """Return the rows of figure 5: what twice the width gains, ntk's gain less standard's.

    The gain is the fall of the loss (`gain`), predicted to be larger under ntk.
    """
    table = []
    for index, (width, twice) in enumerate(itertools.pairwise(widths)):
        standard = gain(curves["standard"][index], curves["standard"][index + 1])
        ntk = gain(curves["ntk"][index], curves["ntk"][index + 1])
        note = (
            f"Each: standard {standard.mean():+.3f}, ntk {ntk.mean():+.3f} nats; "
            "the paper, with more depth too and 0.7 of the rate: +0.040 and +0.066."
        )
        title = f"loss gained by n = {twice} at the best hidden rate of n = {width}"
        table.append(
            excess.value(
                f"{title}, ntk minus standard",
                ntk - standard,
                predicted=0.0,
                above=True,
                source="figure 5",
                note=note,
            )
        )
    return table


def gain(small: Curve, large: Curve) -> np.ndarray:
    """Return how much a larger model gains at the smaller model's best rate, in nats [S].

    The gain is the smaller model's loss less the larger model's. It is NaN where the larger model's
    grid lacks the rate.
    """
    best_rates = small.x[excess.best(small)]
    return excess.least(small) - excess.losses_at(large, best_rates)


def _drifts(widths: Sequence[int], curves: dict[str, list[Curve]]) -> list[Row]:
    """Return rows on how far best rates move per doubling of the width, which should be 0 octaves.

    Two rows are on the best hidden rate, of standard and of ntk, because the paper used one hidden
    rate at both sizes. A third is on ntk's best learning rate, which its own rule keeps constant.
    """
    power = strategies.MAP["ntk"]
    own_rule = []
    for width, curve in zip(widths, curves["ntk"], strict=True):
        own_rule.append(replace(curve, x=curve.x + power * math.log2(width)))
    table = []
    for description, study_curves, source in (
        ("best hidden rate of standard", curves["standard"], "figure 5"),
        ("best hidden rate of ntk", curves["ntk"], "figure 5"),
        ("best learning rate of ntk's own rule", own_rule, "the table's rule"),
    ):
        analysis = analyse(widths, study_curves)
        cost = rates.price_words(analysis)
        table.append(
            Row(
                what=f"octaves that the {description} moves per doubling of n",
                measured=analysis.drift.value,
                low=analysis.drift.low,
                high=analysis.drift.high,
                predicted=0.0,
                tolerance=TOLERANCE,
                source=source,
                note=f"At n = {widths[-1]} what is best at {widths[0]} {cost}.",
            )
        )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw loss against the hidden rate under each strategy, and the cost of lower rates."""
    from mupax.train.studies.transfer import figure as transfer_figure

    widths = settings["width"]
    curves = {name: rates.curves(of_strategy) for name, of_strategy in data.items()}
    figure, axes = panels.row(3, "Encoder-decoders under the effective theory's strategies")
    for panel, name in zip(axes, ("standard", "ntk"), strict=False):
        transfer_figure.draw_study(panel, analyse(widths, curves[name]), curves[name])
        loss_name = "training loss (nats)" if panel is axes[0] else ""
        panels.label(panel, name, "hidden rate h", loss_name)
    low, high = rates.near([*curves["standard"], *curves["ntk"]])
    for panel in axes[:2]:
        panel.set_ylim(low, high)
    axes[1].legend(title="n", frameon=False, fontsize=9)
    _draw_excess(axes[2], widths, curves)
    return figure


def _draw_excess(axes: Axes, widths: Sequence[int], curves: dict[str, list[Curve]]) -> None:
    """Draw the cost of half and of a quarter of the best rate against n, with 95 % intervals."""
    for color, (name, of_strategy) in zip(panels.COLORS, curves.items(), strict=False):
        trained_widths = []
        trained_curves = []
        for width, curve in zip(widths, of_strategy, strict=True):
            if len(curve.x):
                trained_widths.append(width)
                trained_curves.append(curve)
        for octaves, part, style in ((1, "half", "-"), (2, "a quarter", "--")):
            intervals = np.array([mean(excess.excess(curve, octaves)) for curve in trained_curves])
            half_widths = [intervals[:, 0] - intervals[:, 1], intervals[:, 2] - intervals[:, 0]]
            axes.errorbar(
                trained_widths,
                intervals[:, 0],
                yerr=half_widths,
                fmt="o" + style,
                color=color,
                capsize=3,
                ms=4,
                label=f"{name}, {part}",
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    panels.label(axes, "What half of the best rate, or a quarter, costs", "n", "nats")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.45 * (high - low))  # room for the legend above the curves
    panels.add_legend(axes)


FIGURE = Figure(
    title="The effective theory's figures 3 to 5: encoder-decoders at rates below the best",
    source="figures 3, 4 and 5 of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034)",
    about="Training loss of encoder-decoders of width n in the layout of BART-large with 2 + 2 "
    "blocks, on the bytes of Python's sources. `standard` has one initial std and one learning "
    "rate h for all weights. `ntk` moves hidden matrices by the same h (the hidden rate), starts the "
    "embedding table at std 1 and moves it n times as fast. The paper finds that a rate below the "
    "best raises `ntk`'s loss less than `standard`'s.\n\n"
    "The layout is pre-norm with one table and without biases and gains. Heads have "
    "dimension 16, sequences have 64 positions, and the task is BART's infilling. AdamW has "
    "(0.9, 0.998, 1e-6), gradients are clipped at 0.1, and warm-up and decay are linear. "
    "Under `standard` the std is 0.64 n^-1/2 (0.02 at n = 1024), and the head multiplies by "
    "1. Under `ntk` the head multiplies by n^-1/2, everything but the table starts as under "
    "`standard`, and lr = h n^(3/2), so that hidden matrices move by h. In figure 3 half "
    "the best rate costs standard 0.009 nats and ntk 0.002. Relative to their initial std, "
    "ntk's tables move 0.64 n^1/2 times as fast as standard's: 3.6, 5 and 7 times here. "
    "Training losses are means over the last tenth of the steps of one pass, with paired "
    "seeds and the same batches for all. Figure 5 used one h under both strategies at both "
    "sizes. The transfer of ntk's own rule, a constant lr, is another claim and has a row "
    "of its own. A likely reason where the paper's claim does not reproduce: in 150 steps a "
    "low rate mostly trains too little under either strategy, and the paper had 200,000 "
    "steps ([over 600 steps](#the-effective-theorys-figure-3-over-a-longer-run) the sign is "
    "the paper's at n = 64). The paper's n is 1024, and the largest n here is 128.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
