"""What learning rates below the best one cost: the estimator of the effective theory's figure 3, and its rows.

For every seed the best rate is the one of the grid whose mean loss over the *other* seeds is least, so that no seed's noise lowers
the loss that it is compared with. Two strategies are compared seed by seed; both see the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mupax.train.studies.transfer.fit import Curve
from scripts.figures.result import Row, estimate, mean


def best(curve: Curve) -> np.ndarray:
    """Index of the best rate for every seed [S], chosen by the others; rates at which one of those diverged are none.

    Args:
        curve: losses of one size, every rate with every seed.

    Raises:
        ValueError: one seed, or every rate diverged.
    """
    seeds = curve.losses.shape[1]
    if seeds < 2:
        raise ValueError("one seed leaves no other to choose its best rate; measure at least 2")
    leave_one_out = np.stack(
        [np.delete(curve.losses, seed, axis=1).mean(axis=1) for seed in range(seeds)]
    )
    leave_one_out = np.where(np.isfinite(leave_one_out), leave_one_out, np.inf)
    if not np.isfinite(leave_one_out.min(axis=1)).all():
        raise ValueError("every rate of the grid diverged")
    return leave_one_out.argmin(axis=1)


def least(curve: Curve) -> np.ndarray:
    """Loss of every seed [S] at the rate that is best by the others."""
    chosen = best(curve)
    return curve.losses[chosen, np.arange(len(chosen))]


def excess(curve: Curve, octaves: float) -> np.ndarray:
    """Loss of every seed [S] so many octaves below its best rate, less the loss at it; nan where the grid has no such rate.

    Args:
        curve: losses of one size.
        octaves: how far below.
    """
    chosen = best(curve)
    below = [np.flatnonzero(np.abs(curve.x - (curve.x[at] - octaves)) < 1e-6) for at in chosen]
    there = [curve.losses[at[0], seed] if at.size else math.nan for seed, at in enumerate(below)]
    return np.array(there) - least(curve)


def growth(sizes: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Least-squares slope of values [sizes, seeds] per doubling of the size, for every seed [S].

    Args:
        sizes: increasing.
        values: of each size and seed.
    """
    doublings = np.log2(np.asarray(sizes, float))
    doublings -= doublings.mean()
    return doublings @ values / (doublings @ doublings)


def rows(
    what: str, sizes: Sequence[int], curves: Mapping[str, Sequence[Curve]], names: Sequence[str]
) -> list[Row]:
    """Return rows on the cost of half and a quarter of the best rate, one strategy less another, with controls.

    Args:
        what: the sizes are called.
        sizes: increasing.
        curves: strategy to its curve per size; of a control one without rates where it was not trained.
        names: the two strategies, and then those that are put in the first's place as controls.
    """
    first, second, *controls = names
    table: list[Row] = []
    for octaves, part in ((1, "half"), (2, "a quarter of")):
        of = [
            {name: excess(curves[name][at], octaves) for name in names if len(curves[name][at].x)}
            for at in range(len(sizes))
        ]
        apart = [excesses[first] - excesses[second] for excesses in of]
        title = f"loss at {part} the best hidden rate less the least"
        for size, excesses, difference in zip(sizes, of, apart, strict=True):
            each = ", ".join(f"{name} {_interval(excesses[name])}" for name in (first, second))
            title_of = f"{title}, {first} minus {second}, {what} = {size}"
            table.append(
                value(title_of, difference, predicted=0.0, above=True, note=f"Each: {each} nats.")
            )
        if len(sizes) > 1:
            seeds = min(map(len, apart))
            grown = growth(sizes, np.array([difference[:seeds] for difference in apart]))
            table.append(
                value(
                    f"growth of that difference per doubling of {what}",
                    grown,
                    predicted=0.0,
                    above=True,
                )
            )
        for name in controls:
            for size, excesses, difference in zip(sizes, of, apart, strict=True):
                if name not in excesses or not np.isfinite(excesses[name]).all():
                    continue
                own = f"By itself {_interval(excesses[name])} nats."
                bound = {"note": own}
                if mean(difference)[1] > 0:  # without the claim nothing tells the control from it
                    note = f"The bound is half of what {first} has. {own}"
                    bound = {
                        "predicted": float(difference.mean()) / 2,
                        "above": True,
                        "control": True,
                        "note": note,
                    }
                table.append(
                    value(
                        f"{title}, {name}, minus {second}, {what} = {size}",
                        excesses[name] - excesses[second],
                        **bound,
                    )
                )
    return table


def value(what: str, values: np.ndarray, **more: Any) -> Row:
    """The row of a mean over seeds; `more` are fields of `Row`."""
    return estimate(what, mean(values), **more)


def _interval(values: np.ndarray) -> str:
    measured, low, high = mean(values)
    return f"{measured:.3f} [{low:.3f}, {high:.3f}]"
