"""Distance of a proxy from the infinite model, and the width that a proxy needs for an error.

The squared error has a term in the proxy's width and a term in its head dimension.

Shapes: B examples, C classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
"""Relative errors for which the figure gives a width."""


class Terms(NamedTuple):
    """Constants of a proxy's squared relative error a / D + (b / N)^2.

    D is the width and N the head dimension.
    """

    a: float
    b: float


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train proxies of every size, and compute their limits of many heads.

    Shapes have N for head dimensions and D for widths. The limits have head dimensions of their own
    (`limit_head_dims`).

    Returns:
        After the last step, the outputs `limit` [N, draws, B C] and `proxies` [N, D, seeds, B C],
        and the losses `limit_loss` [N, draws] and `loss` [N, D, seeds].
    """
    del work
    from mupax.train.studies.infinite import command as dynamics

    stack_settings = settings["stack"]
    last = max(settings["at"])
    images, targets = fig_dynamics.digits(stack_settings["images"])

    def config(head_dim: int) -> Any:
        stack = {**stack_settings, "head_dim": head_dim}
        return fig_dynamics.run({**settings, "stack": stack}, stack_settings["depth"][0])

    limit_outputs = []
    limit_losses = []
    for n in settings["limit_head_dims"]:
        heads = stack_settings["limit"] // n
        limit = dynamics.limit(
            config(n), images, targets, heads=heads, draws=stack_settings["draws"], seed=n
        )
        limit_outputs.append(limit.logits[:, last].reshape(stack_settings["draws"], -1))
        limit_losses.append(limit.losses[:, last])

    outputs = []
    losses = []
    for n in settings["head_dims"]:
        outputs_by_width = []
        losses_by_width = []
        for width in settings["widths"]:
            proxy = dynamics.with_heads(config(n), width // n)
            nets = dynamics.finite(proxy, images, targets, seeds=stack_settings["seeds"])
            outputs_by_width.append(nets.logits[:, last].reshape(stack_settings["seeds"], -1))
            losses_by_width.append(nets.losses[:, last])
        outputs.append(outputs_by_width)
        losses.append(losses_by_width)
    return {
        "limit": limit_outputs,
        "limit_loss": limit_losses,
        "proxies": outputs,
        "loss": losses,
    }


def infinite(settings: Settings, limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs at infinite N, and their slope in 1/N, for every draw [draws, B C].

    A straight line in 1/N is fitted through the limits of many heads.

    Args:
        settings: Settings of the figure, which have the limits' head dimensions.
        limit: Outputs [N, draws, B C] of the limits.
    """
    x = 1 / np.asarray(settings["limit_head_dims"], float)
    slope = np.einsum("n,ndo->do", (x - x.mean()) / ((x - x.mean()) ** 2).sum(), limit)
    return limit.mean(0) - slope * x.mean(), slope


def terms(settings: Settings, data: Data, draws: np.ndarray | None = None) -> Terms:
    """Return the constants a and b of the squared relative error a / D + (b / N)^2.

    b follows from the limits alone, and a from the proxies with the largest head dimension.

    Args:
        draws: Indices of the limit's draws to use; all by default.
    """
    limit = np.asarray(data["limit"])
    if draws is not None:
        limit = limit[:, draws]
    outputs, slope = infinite(settings, limit)
    end = outputs.mean(0)
    count = len(slope)
    # Products of different draws only, so that the square does not have the draws' noise.
    squares = (slope.sum(0) @ slope.sum(0) - (slope**2).sum()) / (count * (count - 1))
    b = np.sqrt(max(squares, 0.0) / (end @ end))
    errors = squared_errors(data, end)[-1].mean(-1)
    width_errors = errors - (b / settings["head_dims"][-1]) ** 2
    a = np.mean(width_errors * np.asarray(settings["widths"]))
    return Terms(float(a), float(b))


def squared_errors(data: Data, end: np.ndarray) -> np.ndarray:
    """Return the squared relative errors of the proxies' outputs.

    The result is [N, D, seeds], for head dimensions N and widths D.

    Args:
        end: Outputs [B C] of the infinite model.
    """
    return ((np.asarray(data["proxies"]) - end) ** 2).sum(-1) / (end @ end)


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows on the formula for the error, a / D + (b / N)^2 (see `Terms`).

    They have the constants a and b, the errors of proxies over the formula's, a control without the
    term in N, and the widths that the formula needs for each of `ERRORS`.
    """
    a, b = terms(settings, data)
    outputs, _ = infinite(settings, np.asarray(data["limit"]))
    errors = squared_errors(data, outputs.mean(0))
    widths = np.asarray(settings["widths"], float)
    last = errors[-1] - (b / settings["head_dims"][-1]) ** 2
    a_interval = mean(last.T @ widths / len(last))
    num_draws = np.asarray(data["limit"]).shape[1]
    b_interval = jackknife(lambda draws: terms(settings, data, draws).b, num_draws)
    table = [
        estimate("a, the squared relative error of outputs times the width", a_interval),
        estimate("b, the relative error times the head dimension as heads grow", b_interval),
    ]

    # The formula is tested on the head dimensions that a was not fitted to.
    for n, of_n in zip(settings["head_dims"][:-1], errors, strict=False):
        for width, squares in zip(settings["widths"], of_n, strict=True):
            description = f"error of proxies of N = {n}, D = {width} over sqrt(a / D + (b / N)^2)"
            predicted = a / width + (b / n) ** 2
            table.append(_ratio_row(description, squares, predicted))
    n = settings["head_dims"][0]
    width = settings["widths"][-1]
    description = f"the same of N = {n}, D = {width}, without the term in N"
    table.append(_ratio_row(description, errors[0, -1], a / width, control=True))

    _, a_low, a_high = a_interval
    _, b_low, b_high = b_interval
    for error in ERRORS:
        n, width = needed(a, b, error)
        low = width_of(a_low, b_low, n, error)
        high = width_of(a_high, b_high, n, error)
        description = f"width for an error of {error:.0%} at N = {n}"
        note = "The interval has both terms at the same end of theirs."
        table.append(estimate(description, (width, low, high), note=note))
    return table


def _ratio_row(
    description: str, squares: np.ndarray, predicted: float, *, control: bool = False
) -> Row:
    """Return the row of a measured error over the predicted one, which should be 1.

    Args:
        squares: Squared errors [seeds].
        predicted: Predicted squared error, in the unit of `squares`.
    """
    ratio = np.sqrt(squares.mean(-1) / predicted)
    half_width = half_width_of(squares, ratio)
    return Row(
        what=description,
        measured=float(ratio),
        low=float(ratio - half_width),
        high=float(ratio + half_width),
        predicted=1.0,
        tolerance=0.25,
        kind="value",
        control=control,
    )


def half_width_of(squares: np.ndarray, ratio: float) -> float:
    """Return the half-width of the 95 % interval of the root of a mean of squares.

    Args:
        squares: Squared errors [seeds].
        ratio: Root of their mean, in the unit that the half-width shall have.
    """
    return float(1.96 * squares.std(ddof=1) / len(squares) ** 0.5 / (2 * squares.mean()) * ratio)


def needed(a: float, b: float, error: float) -> tuple[int, float]:
    """Return the head dimension and the width that a proxy needs for a relative error.

    The head dimension is the least power of two whose term is at most a quarter of the squared
    error.

    Args:
        a: Constant of the term in the width, see `terms`.
        b: Constant of the term in the head dimension, see `terms`.
        error: Relative error, such as 0.1.
    """
    n = 1
    while (b / n) ** 2 > error**2 / 4:
        n *= 2
    return n, width_of(a, b, n, error)


def width_of(a: float, b: float, head_dim: int, error: float) -> float:
    """Return the width at which a proxy with a head dimension has a relative error.

    Args:
        a: Constant of the term in the width, see `terms`.
        b: Constant of the term in the head dimension, see `terms`.
        head_dim: Head dimension `N`.
        error: Relative error, above `b / N`.
    """
    return a / (error**2 - (b / head_dim) ** 2)


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw errors and losses against the width, in one colour for each head dimension.

    Measured errors are dots, and the formula's are lines.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, (left, right) = panels.row(2, "How far is a proxy from the infinite model?", height=4.4)
    a, b = terms(settings, data)
    outputs, _ = infinite(settings, np.asarray(data["limit"]))
    end = outputs.mean(0)
    widths = np.asarray(settings["widths"], float)
    _, largest_width = needed(a, b, ERRORS[-1])
    line = np.geomspace(widths[0], largest_width * 1.5)
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
        every_width = np.repeat(widths, losses.shape[-1])
        right.plot(every_width, losses.ravel(), ".", color=color, alpha=0.2, markersize=4)
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
    title = "Relative error of the output (dots: our step; lines: formula)"
    panels.label(left, title, "width D", "%")
    title = "Loss after the same steps; dashed: infinitely many heads"
    panels.label(right, title, "width D", "nats")
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
        panels.add_legend(panel)
    left.set_yscale("log")
    left.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 40]))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    return figure


FIGURE = Figure(
    title="How far a proxy is from the infinite model",
    source="[the infinite limit in time](#the-infinite-limit-in-time), measured here",
    about="Error of the centred outputs (outputs less initial outputs) of the ViT of Bordelon et "
    "al. 2024 after 8 steps on one batch of digits, relative to the ViT with infinitely many heads "
    "of infinite dimension. The error is predicted to be (a/D + (b/N)^2)^(1/2) at width D and head "
    "dimension N, with fitted a and b.\n\n"
    "Errors are root mean squares over those of the infinite model's outputs. The models "
    "are trained by mupax's own step. The limit of many heads is taken at several head "
    "dimensions, and a line in 1/N through them gives N to infinity and b; a is of the "
    "proxies with the largest N.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
