"""Figures 3 to 5 of Dinan, Yaida and Zhang 2023 on encoder-decoders that a CPU can train: how sharp the best learning rate is."""

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
"""Nats that count as equal losses: what seeds differ by at a best rate."""


def config(settings: Settings, strategy: str, width: int, hidden: float, seed: int) -> Config:
    """The run of one point.

    Args:
        settings: of the figure.
        strategy: a key of its `grid`.
        width: n.
        hidden: rate of hidden matrices.
        seed: of the initialization; all points see the same batches.
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


def grid(settings: Settings, strategy: str, at: int) -> list[float]:
    """log2 of the hidden rates of a width: from the one end of its entry in the settings to the other, in half octaves.

    Args:
        settings: of the figure.
        strategy: a key of its `grid`.
        at: index of the width.
    """
    low, high = settings["grid"][strategy][at] or (0.0, -1.0)  # none
    return [low + STEP * n for n in range(round((high - low) / STEP) + 1)]


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Losses of every strategy as `rates.curves` reads them: rates `x` and `losses` [rates][seeds] per width."""
    by_strategy: dict[str, Any] = {
        strategy: {"x": [], "losses": [], "first": []} for strategy in settings["grid"]
    }
    for at in range(len(settings["width"])):
        for strategy, (x, losses) in of_width(settings, work, at).items():
            by_strategy[strategy]["x"].append(x)
            by_strategy[strategy]["losses"].append(losses)
            by_strategy[strategy]["first"].append(settings["seeds"][at])
    return by_strategy


def of_width(settings: Settings, work: Path, at: int) -> dict[str, Any]:
    """Rates and losses [rates][seeds] of one width under every strategy, trained where the folder has no row of them.

    Args:
        settings: of the figure.
        work: folder of the rows; each width has one in it.
        at: index of the width.
    """
    from mupax.train.studies.sweep.sweep import Sweep

    width, seeds = settings["width"][at], settings["seeds"][at]
    points = [(strategy, x) for strategy in settings["grid"] for x in grid(settings, strategy, at)]
    configs = [
        config(settings, strategy, width, 2.0**x, seed)
        for strategy, x in points
        for seed in range(seeds)
    ]
    losses = [
        rates.kept_loss(row.loss) for row in Sweep(work / str(width), evaluated=False).run(configs)
    ]
    by_strategy: dict[str, Any] = {strategy: ([], []) for strategy in settings["grid"]}
    for index, (strategy, x) in enumerate(points):
        by_strategy[strategy][0].append(x)
        by_strategy[strategy][1].append(losses[index * seeds : (index + 1) * seeds])
    return by_strategy


def rows(settings: Settings, data: Data) -> list[Row]:
    """Figure 3: what rates below the best cost; figure 4: the least losses; figure 5: what twice the width gains, and transfer."""
    widths, curves = (
        settings["width"],
        {name: rates.curves(of_strategy) for name, of_strategy in data.items()},
    )
    table = [
        *excess.rows("n", widths, curves, ["standard", "ntk", *settings["embeddings"]]),
        *least(widths, curves),
        *_wider(widths, curves),
        *_drifts(widths, curves),
    ]
    return [row for row in table if math.isfinite(row.measured)]


def least(widths: Sequence[int], curves: dict[str, list[Curve]]) -> list[Row]:
    """Figure 4: ntk's least loss less standard's at every width.

    Args:
        widths: n.
        curves: strategy to its curve per width.
    """
    table = []
    for at, width in enumerate(widths):
        standard, ntk = (excess.least(curves[name][at]) for name in ("standard", "ntk"))
        note = f"Standard {standard.mean():.3f}, ntk {ntk.mean():.3f} nats; the paper (n = 1024, one seed each): 0.967 and 0.971."
        what = f"least loss, ntk minus standard, n = {width}"
        table.append(
            excess.value(
                what, ntk - standard, predicted=0.0, tolerance=SAME, source="figure 4", note=note
            )
        )
    return table


def _wider(widths: Sequence[int], curves: dict[str, list[Curve]]) -> list[Row]:
    """What a doubling of n gains at the smaller width's best hidden rate: ntk's gain less standard's."""
    table = []
    for at, (width, twice) in enumerate(itertools.pairwise(widths)):
        gains = {name: gain(*curves[name][at : at + 2]) for name in ("standard", "ntk")}
        each = ", ".join(f"{name} {values.mean():+.3f}" for name, values in gains.items())
        what = (
            f"loss gained by n = {twice} at the best hidden rate of n = {width}, ntk minus standard"
        )
        table.append(
            excess.value(
                what,
                gains["ntk"] - gains["standard"],
                predicted=0.0,
                above=True,
                source="figure 5",
                note=f"Each: {each} nats; the paper, with more depth too and 0.7 of the rate: +0.040 and +0.066.",
            )
        )
    return table


def gain(small: Curve, large: Curve) -> np.ndarray:
    """Loss of the smaller model at its best rate less that of the larger one at the same rate, for every seed [S].

    Args:
        small: curve of the one.
        large: of the other; nan where its grid lacks the rate.
    """
    there = [np.flatnonzero(np.abs(large.x - small.x[at]) < 1e-6) for at in excess.best(small)]
    losses = [large.losses[at[0], seed] if at.size else math.nan for seed, at in enumerate(there)]
    return excess.least(small) - np.array(losses)


def _drifts(widths: Sequence[int], curves: dict[str, list[Curve]]) -> list[Row]:
    """Transfer of the hidden rate, as the paper used it under both, and of ntk's own learning rate: two claims."""
    power = strategies.MAP["ntk"]
    own = [
        replace(curve, x=curve.x + power * math.log2(width))
        for width, curve in zip(widths, curves["ntk"], strict=True)
    ]
    table = []
    for what, some in (
        ("best hidden rate, standard", curves["standard"]),
        ("best hidden rate, ntk", curves["ntk"]),
        ("best learning rate of ntk's own rule", own),
    ):
        analysis = analyse(widths, some)
        price = analysis.prices[-1].value
        cost = (
            f"costs {price:.2g} nats"
            if math.isfinite(price)
            else "diverges or lies outside the grid"
        )
        table.append(
            Row(
                what=f"octaves that the {what}, moves per doubling of n",
                measured=analysis.drift.value,
                low=analysis.drift.low,
                high=analysis.drift.high,
                predicted=0.0,
                tolerance=TOLERANCE,
                source="figure 5" if "hidden" in what else "the table's rule",
                note=f"At n = {widths[-1]} what is best at {widths[0]} {cost}.",
            )
        )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Loss against the hidden rate per strategy, a curve per n; and what half the best rate costs against n."""
    from mupax.train.studies.transfer import figure as transfer_figure

    widths, curves = (
        settings["width"],
        {name: rates.curves(of_strategy) for name, of_strategy in data.items()},
    )
    figure, axes = panels.row(3, "Encoder-decoders under the effective theory's strategies")
    for one, name in zip(axes, ("standard", "ntk"), strict=False):
        transfer_figure.draw_study(one, analyse(widths, curves[name]), curves[name])
        panels.label(one, name, "hidden rate h", "training loss (nats)" if one is axes[0] else "")
    low, high = rates.near([curve for name in ("standard", "ntk") for curve in curves[name]])
    for one in axes[:2]:
        one.set_ylim(low, high)
    axes[1].legend(title="n", frameon=False, fontsize=9)
    _draw_excess(axes[2], widths, curves)
    return figure


def _draw_excess(axes: Axes, widths: Sequence[int], curves: dict[str, list[Curve]]) -> None:
    for color, (name, of_strategy) in zip(panels.COLORS, curves.items(), strict=False):
        for octaves, style in ((1, "-"), (2, "--")):
            there = [at for at, curve in enumerate(of_strategy) if len(curve.x)]
            intervals = np.array([mean(excess.excess(of_strategy[at], octaves)) for at in there])
            room = [intervals[:, 0] - intervals[:, 1], intervals[:, 2] - intervals[:, 0]]
            label = f"{name}, {'half' if octaves == 1 else 'a quarter'}"
            axes.errorbar(
                [widths[at] for at in there],
                intervals[:, 0],
                yerr=room,
                fmt="o" + style,
                color=color,
                capsize=3,
                ms=4,
                label=label,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    panels.label(axes, "What half of the best rate, or a quarter, costs", "n", "nats")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.45 * (high - low))  # room for the legend above the curves
    panels.add_legend(axes)


MATCHED = "standard, tables as fast as ntk's"

FIGURE = Figure(
    title="The effective theory's figures 3 to 5: encoder-decoders at rates below the best",
    source="figures 3, 4 and 5 of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034): BART-large and R2C2 under two strategies",
    about="Encoder-decoders in the layout of BART-large with 2 + 2 blocks on the bytes of Python's "
    "sources: `standard` has one std and one learning rate h everywhere, and `ntk` starts its "
    "table at std 1 and moves it by h n. The layout is pre-norm with one table and without "
    "biases and gains. Heads have dimension 16, sequences have 64 positions, and the task is "
    "BART's infilling. AdamW has (0.9, 0.998, 1e-6), gradients are clipped at 0.1, and warm-up "
    "and decay are linear. Under `standard` the std is 0.64 n^-1/2 (0.02 at n = 1024), and the "
    "head multiplies by 1. Under `ntk` the head multiplies by n^-1/2, everything but the table "
    "starts as under `standard`, and lr = h n^(3/2), so that hidden matrices move by h. In "
    "figure 3 half the best rate costs standard 0.009 nats and ntk 0.002. Relative to their "
    "initial std, ntk's tables move 0.64 n^1/2 times as fast as standard's: 3.6, 5 and 7 times "
    "here. Training losses are means over the last tenth of the steps of one pass, with paired "
    "seeds and the same batches for all. Figure 5 used one h under both strategies at both "
    "sizes. The transfer of ntk's own rule, a constant lr, is another claim and has a row of "
    "its own. A likely reason where the paper's claim does not reproduce: in 150 steps a low "
    "rate mostly trains too little under either strategy, and the paper had 200,000 steps "
    "([over 600 steps](#the-effective-theorys-figure-3-over-a-longer-run) the sign is the "
    "paper's at n = 64). The paper's n is 1024, and the largest n here is 128.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
