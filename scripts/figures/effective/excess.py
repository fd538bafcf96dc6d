"""Cost of learning rates below the best one: the estimator of the effective theory's figure 3.

For every seed the best rate is the grid's rate with the least mean loss over the *other* seeds, so
that a seed's noise does not lower the loss that the seed is compared with. Two strategies are
compared seed by seed, and both see the same batches.

Shapes: S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mupax.train.studies.transfer.fit import Curve
from scripts.figures.result import Row, estimate, mean


def best(curve: Curve) -> np.ndarray:
    """Return the index of the best learning rate for every seed [S], chosen by the other seeds.

    Args:
        curve: Losses of one size; every rate has all seeds.

    Raises:
        ValueError: There is one seed, or every rate diverged.
    """
    seeds = curve.losses.shape[1]
    if seeds < 2:
        raise ValueError("one seed leaves no other to choose its best rate; measure at least 2")
    leave_one_out = np.stack(
        [np.delete(curve.losses, seed, axis=1).mean(axis=1) for seed in range(seeds)]
    )
    # A rate at which one of the other seeds diverged is never the best.
    leave_one_out = np.where(np.isfinite(leave_one_out), leave_one_out, np.inf)
    if not np.isfinite(leave_one_out.min(axis=1)).all():
        raise ValueError("every rate of the grid diverged")
    return leave_one_out.argmin(axis=1)


def least(curve: Curve) -> np.ndarray:
    """Return the loss of every seed [S] at the learning rate of `best`."""
    chosen = best(curve)
    return curve.losses[chosen, np.arange(len(chosen))]


def excess(curve: Curve, octaves: float) -> np.ndarray:
    """Return the loss of every seed [S] at a lower learning rate, less its loss at the best one.

    The result is NaN for seeds whose lower rate is not in the grid.

    Args:
        octaves: Octaves from the best rate down to the lower rate; 1 is half the rate. Negative
            values give a higher rate.
    """
    losses = losses_at(curve, curve.x[best(curve)] - octaves)
    return losses - least(curve)


def losses_at(curve: Curve, log2_rates: np.ndarray) -> np.ndarray:
    """Return the loss of every seed [S] at a rate of its own, NaN where the grid lacks the rate.

    Args:
        log2_rates: log2 of the rate of every seed [S].
    """
    losses = []
    for seed, log2_rate in enumerate(log2_rates):
        matches = np.flatnonzero(np.abs(curve.x - log2_rate) < 1e-6)
        losses.append(curve.losses[matches[0], seed] if matches.size else math.nan)
    return np.array(losses)


def growth(sizes: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Return the least-squares slope [S] of values [sizes, S] per doubling of the size."""
    doublings = np.log2(np.asarray(sizes, float))
    doublings -= doublings.mean()
    return doublings @ values / (doublings @ doublings)


def rows(
    what: str, sizes: Sequence[int], curves: Mapping[str, Sequence[Curve]], names: Sequence[str]
) -> list[Row]:
    """Compare what half and a quarter of the best rate cost under two strategies.

    The cost is `excess`. For each size a row has the first strategy's cost less the second's, which
    is predicted to be above 0. Another row has the growth of this difference with the size.

    Args:
        what: Name of the size in rows, such as `n`.
        sizes: Sizes [sizes], ascending.
        curves: Strategy to its curves, one per size. A curve without rates was not trained.
        names: Names of the first and the second strategy, followed by controls: further strategies
            that take the first one's place, and must have at most half of its difference.
    """
    first, second, *controls = names
    table: list[Row] = []
    for octaves, part in ((1, "half"), (2, "a quarter of")):
        title = f"loss at {part} the best hidden rate less the least"
        excesses_by_size = []
        for index in range(len(sizes)):
            excesses = {}
            for name in names:
                if len(curves[name][index].x):
                    excesses[name] = excess(curves[name][index], octaves)
            excesses_by_size.append(excesses)
        differences = [excesses[first] - excesses[second] for excesses in excesses_by_size]

        for size, excesses, difference in zip(sizes, excesses_by_size, differences, strict=True):
            row_title = f"{title}, {first} minus {second}, {what} = {size}"
            own_words = ", ".join(f"{name} {_interval(excesses[name])}" for name in (first, second))
            note = f"Each: {own_words} nats."
            table.append(value(row_title, difference, predicted=0.0, above=True, note=note))
        if len(sizes) > 1:
            seeds = min(map(len, differences))
            slopes = growth(sizes, np.array([difference[:seeds] for difference in differences]))
            row_title = f"growth of that difference per doubling of {what}"
            table.append(value(row_title, slopes, predicted=0.0, above=True))
        for name in controls:
            for size, excesses, difference in zip(
                sizes, excesses_by_size, differences, strict=True
            ):
                if name not in excesses or not np.isfinite(excesses[name]).all():
                    continue
                row_title = f"{title}, {name}, minus {second}, {what} = {size}"
                bound = _control_bound(first, excesses[name], difference)
                table.append(value(row_title, excesses[name] - excesses[second], **bound))
    return table


def _control_bound(first: str, control: np.ndarray, difference: np.ndarray) -> dict[str, Any]:
    """Return fields of `Row` for a control in `rows`: half the strategies' difference as a bound.

    There is no bound unless the interval of the difference is above 0.

    Args:
        first: Name of the strategy whose place the control takes.
        control: Excess of the control [S].
        difference: Excess of the first strategy less that of the second [S].
    """
    own_words = f"By itself {_interval(control)} nats."
    _, low, _ = mean(difference)
    # Without the claim, nothing tells the control from the strategy.
    if low > 0:
        return {
            "predicted": float(difference.mean()) / 2,
            "above": True,
            "control": True,
            "note": f"The bound is half of what {first} has. {own_words}",
        }
    return {"note": own_words}


def value(what: str, values: np.ndarray, **fields: Any) -> Row:
    """Return the row of the mean of values [S].

    Args:
        fields: Further fields of `Row`.
    """
    return estimate(what, mean(values), **fields)


def _interval(values: np.ndarray) -> str:
    measured, low, high = mean(values)
    return f"{measured:.3f} [{low:.3f}, {high:.3f}]"
