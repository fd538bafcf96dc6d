"""How far a proxy is from the infinite model: a term in its width and one in its head dimension, and the width for a named error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.infinite import fig_dynamics
from scripts.figures.result import (
    Data,
    Figure,
    Row,
    Settings,
    estimate,
    jackknife,
    mean,
    settings_of,
)

if TYPE_CHECKING:
    import matplotlib.figure

ERRORS = (0.2, 0.1, 0.05)
"""That a reader may want."""


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Outputs after the last step: of the limit of many heads [N, draws, B C], of proxies [N, width, seeds, B C]; and losses."""
    del work
    from mupax.train.studies.infinite import command as dynamics

    own, steps = settings["stack"], max(settings["at"])
    images, targets = fig_dynamics.digits(own["images"])

    def config(head_dim: int) -> Any:
        return fig_dynamics.run(
            {**settings, "stack": {**own, "head_dim": head_dim}}, own["depth"][0]
        )

    limits = [
        dynamics.limit(
            config(n), images, targets, heads=own["limit"] // n, draws=own["draws"], seed=n
        )
        for n in settings["limit_head_dims"]
    ]
    nets = [
        [
            dynamics.finite(
                dynamics.with_heads(config(n), width // n), images, targets, seeds=own["seeds"]
            )
            for width in settings["widths"]
        ]
        for n in settings["head_dims"]
    ]
    return {
        "limit": [of.logits[:, steps].reshape(own["draws"], -1) for of in limits],
        "limit_loss": [of.losses[:, steps] for of in limits],
        "proxies": [
            [of.logits[:, steps].reshape(own["seeds"], -1) for of in at_n] for at_n in nets
        ],
        "loss": [[of.losses[:, steps] for of in at_n] for at_n in nets],
    }


def infinite(settings: Settings, limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs as N grows too, and what 1/N adds to them, per draw [draws, B C]: a line through the limits of many heads.

    Args:
        settings: have their head dimensions.
        limit: [N, draws, B C].
    """
    x = 1 / np.asarray(settings["limit_head_dims"], float)
    slope = np.einsum("n,ndo->do", (x - x.mean()) / ((x - x.mean()) ** 2).sum(), limit)
    return limit.mean(0) - slope * x.mean(), slope


def terms(settings: Settings, data: Data, draws: np.ndarray | None = None) -> tuple[float, float]:
    """a and b of the squared relative error a / D + (b / N)^2.

    b is of the limits alone, its square without the draws' own noise; a of the proxies with the largest head dimension.

    Args:
        settings, data: of the figure.
        draws: of the limit to take; all unless given.
    """
    limit = np.asarray(data["limit"])
    end, slope = infinite(settings, limit if draws is None else limit[:, draws])
    end, count = end.mean(0), len(slope)
    squares = (slope.sum(0) @ slope.sum(0) - (slope**2).sum()) / (count * (count - 1))
    b = np.sqrt(max(squares, 0.0) / (end @ end))
    errors = squared_errors(data, end)[-1].mean(-1)
    rest = errors - (b / settings["head_dims"][-1]) ** 2
    return float(np.mean(rest * np.asarray(settings["widths"]))), float(b)


def squared_errors(data: Data, end: np.ndarray) -> np.ndarray:
    """Of every proxy's outputs relative to their own size at infinity, [N, width, seeds].

    Args:
        data: of the figure.
        end: outputs at infinity [B C].
    """
    return ((np.asarray(data["proxies"]) - end) ** 2).sum(-1) / (end @ end)


def rows(settings: Settings, data: Data) -> list[Row]:
    """Both constants, the widths they ask for, and the formula against the proxies that it was not made from."""
    table = []
    a, b = terms(settings, data)
    end = infinite(settings, np.asarray(data["limit"]))[0].mean(0)
    errors = squared_errors(data, end)
    last = errors[-1] - (b / settings["head_dims"][-1]) ** 2
    of_seeds = mean(last.T @ np.asarray(settings["widths"], float) / len(last))
    of_draws = jackknife(
        lambda draws: terms(settings, data, draws)[1], np.asarray(data["limit"]).shape[1]
    )
    for what, interval in (
        ("a, the squared relative error of outputs times the width", of_seeds),
        ("b, the relative error times the head dimension as heads grow", of_draws),
    ):
        table.append(estimate(what, interval))
    for n, of_n in zip(settings["head_dims"][:-1], errors, strict=False):
        predicted = a / np.asarray(settings["widths"], float) + (b / n) ** 2
        ratio = np.sqrt(of_n.mean(-1) / predicted)
        room = 1.96 * of_n.std(-1, ddof=1) / of_n.shape[-1] ** 0.5 / (2 * of_n.mean(-1)) * ratio
        for index, width in enumerate(settings["widths"]):
            table.append(
                Row(
                    what=f"error of proxies of N = {n}, D = {width} over sqrt(a / D + (b / N)^2)",
                    measured=float(ratio[index]), low=float(ratio[index] - room[index]), high=float(ratio[index] + room[index]),
                    predicted=1.0, tolerance=0.25, kind="value",
                )
            )  # fmt: skip
    without = np.sqrt(errors[0, -1].mean() / (a / settings["widths"][-1]))
    table.append(
        Row(
            what=f"the same of N = {settings['head_dims'][0]}, D = {settings['widths'][-1]}, without the term in N",
            measured=float(without), low=float(without - room_of(errors[0, -1], without)),
            high=float(without + room_of(errors[0, -1], without)),
            predicted=1.0, tolerance=0.25, kind="value", control=True,
        )
    )  # fmt: skip
    for error in ERRORS:
        n, width = needed(a, b, error)
        low, high = (
            width_of(a_end, b_end, n, error)
            for a_end, b_end in zip(of_seeds[1:], of_draws[1:], strict=True)
        )
        what = f"width for an error of {error:.0%} at N = {n}"
        note = "The interval has both terms at the same end of theirs."
        table.append(estimate(what, (width, low, high), note=note))
    return table


def room_of(squares: np.ndarray, ratio: float) -> float:
    """Half of the 95 % interval of the root of a mean of squares [seeds], over what makes it `ratio`."""
    return float(1.96 * squares.std(ddof=1) / len(squares) ** 0.5 / (2 * squares.mean()) * ratio)


def needed(a: float, b: float, error: float) -> tuple[int, float]:
    """The least head dimension, a power of two, whose term is at most a quarter of the square of an error, and the width beside it.

    Args:
        a, b: of `terms`.
        error: relative.
    """
    n = 1
    while (b / n) ** 2 > error**2 / 4:
        n *= 2
    return n, width_of(a, b, n, error)


def width_of(a: float, b: float, head_dim: int, error: float) -> float:
    """The width at which heads of a dimension have an error.

    Args:
        a, b: of `terms`.
        head_dim: N.
        error: relative, above b / N.
    """
    return a / (error**2 - (b / head_dim) ** 2)


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Errors against width, a colour per head dimension, dots measured and lines by the formula; and the loss beside them."""
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, (left, right) = panels.row(2, "How far is a proxy from the infinite model?", height=4.4)
    a, b = terms(settings, data)
    end = infinite(settings, np.asarray(data["limit"]))[0].mean(0)
    widths = np.asarray(settings["widths"], float)
    line = np.geomspace(widths[0], needed(a, b, ERRORS[-1])[1] * 1.5)
    limits = dict(zip(settings["limit_head_dims"], np.asarray(data["limit_loss"]), strict=True))
    for color, n, squares, losses in zip(
        panels.COLORS,
        settings["head_dims"],
        squared_errors(data, end),
        np.asarray(data["loss"]),
        strict=False,
    ):
        left.plot(line, 100 * np.sqrt(a / line + (b / n) ** 2), color=color, label=f"N = {n}")
        left.plot(widths, 100 * np.sqrt(squares.mean(-1)), "o", color=color, markersize=5)
        right.plot(
            np.repeat(widths, losses.shape[-1]),
            losses.ravel(),
            ".",
            color=color,
            alpha=0.2,
            markersize=4,
        )
        right.plot(widths, losses.mean(-1), "o-", color=color, markersize=5, label=f"N = {n}")
        right.axhline(limits[n].mean(), color=color, linestyle="--", linewidth=1.1)
    for error in ERRORS:
        n, width = needed(a, b, error)
        left.plot([line[0], width], [100 * error] * 2, color=panels.GREY, linewidth=0.8)
        left.annotate(
            f"{error:.0%}: D = {width:,.0f}, N = {n}",
            (line[0], 100 * error),
            (2, -10),
            textcoords="offset points",
            fontsize=8,
        )
    panels.label(
        left, "Relative error of the output (dots: our step; lines: formula)", "width D", "%"
    )
    panels.label(
        right, "Loss after the same steps; dashed: infinitely many heads", "width D", "nats"
    )
    for one in (left, right):
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
        panels.add_legend(one)
    left.set_yscale("log")
    left.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 40]))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    return figure


FIGURE = Figure(
    title="How far a proxy is from the infinite model",
    source="the infinite limit in time, measured here (`scripts/figures/infinite/fig_dynamics.py`)",
    about="Error of the centred outputs of the paper's ViT at alpha_A = 1, trained on one batch of "
    "digits until the loss has halved, relative to infinitely many heads of infinite dimension. "
    "Errors are root mean squares over those of the infinite model's outputs. The models are "
    "trained by mupax's own step. The limit of many heads is taken at several head dimensions, "
    "and a line in 1/N through them gives N to infinity and b; a is of the proxies with the "
    "largest N.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
