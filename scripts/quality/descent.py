"""Pattern search for the setting with the least loss among its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Setting = tuple[tuple[str, int], ...]
"""Names of constants with their numbers of search steps, sorted, without those at 0 steps."""
Losses = Callable[[Sequence[Setting], int], np.ndarray]
"""Function from settings [n] and a number of seeds to losses float64 [n, seeds].

The loss is infinite where a run diverged.
"""
FAR = 12
"""Half the number of moves after which a search fails: a loss that falls forever has no minimum."""


def setting(values: Mapping[str, int]) -> Setting:
    """Return constants and their search steps as a setting, which can be a dictionary's key."""
    return tuple(sorted((name, value) for name, value in values.items() if value))


def neighbours(centre: Setting, constants: Sequence[str]) -> list[Setting]:
    """Return the centre, and then the centre with each constant one step down and one step up."""
    values = dict(centre)
    settings = [centre]
    for name in constants:
        for step in (-1, 1):
            settings.append(setting({**values, name: values.get(name, 0) + step}))
    return settings


def descend(
    losses: Losses,
    start: Setting,
    constants: Sequence[str],
    seeds: int,
    final: int,
    finalists: int | None = None,
) -> Setting:
    """Return the setting whose mean loss over seeds is less than that of all its neighbours.

    The search moves on `seeds` seeds. Where it ends, it repeats the comparison on `final` seeds and
    moves on if the result differs. With `finalists` it compares only the best few settings on
    `final` seeds and then ends, which costs a third.

    Args:
        losses: Function that trains settings and returns their losses.
        seeds: Number of seeds of the first moves.
        final: Number of seeds of the last comparison, at least `seeds`.
        finalists: Number of settings in the last comparison. None compares the centre with all of
            its neighbours.

    Raises:
        ValueError: There is no minimum within `2 * FAR` moves.
    """
    centre = start
    count = seeds
    visited = {start}
    for _ in range(2 * FAR):
        settings = neighbours(centre, constants)
        means = np.mean(losses(settings, count), axis=1)
        best = settings[int(np.argmin(means))]

        # A visited setting ends the moves, too: the search would go back and forth between equals.
        if best != centre and best not in visited:
            centre = best
            visited.add(centre)
            continue
        if count >= final:
            return best if means.min() < means[0] else centre
        if finalists is not None:
            ranked = np.argsort(means, kind="stable")[:finalists]
            last = [settings[index] for index in ranked]
            final_means = np.mean(losses(last, final), axis=1)
            return last[int(np.argmin(final_means))]
        count = final
        visited = {centre}
    raise ValueError(
        f"no minimum within {2 * FAR} moves of {dict(start)}: the last was {dict(centre)}"
    )


def descend_in_turn(
    losses: Losses,
    start: Setting,
    constants: Sequence[str],
    seeds: int,
    final: int,
    finalists: int,
) -> Setting:
    """Return the setting whose mean loss over seeds is less than that of all its neighbours.

    The search moves along one constant until neither neighbour is better, then along the next one.
    It ends after a round without a move. All neighbours of the last setting are then trained, as by
    `descend`. With seven constants it trains about half as many settings.

    Args:
        losses: Function that trains settings and returns their losses.
        constants: Constants to search, in the order of the search.
        final: Number of seeds of the last comparison, at least `seeds`.

    Raises:
        ValueError: There is no minimum within `FAR` rounds, or along one constant.
    """
    centre = start
    for _ in range(FAR):
        before = centre
        for constant in constants:
            centre = _lowest_along(losses, centre, constant, seeds)
        if centre != before:
            continue
        settings = neighbours(centre, constants)
        means = np.mean(losses(settings, seeds), axis=1)
        ranked = np.argsort(means, kind="stable")[:finalists]
        last = [settings[index] for index in ranked]
        final_means = np.mean(losses(last, final), axis=1)
        return last[int(np.argmin(final_means))]
    raise ValueError(
        f"no minimum within {FAR} rounds from {dict(start)}: the last was {dict(centre)}"
    )


def _lowest_along(losses: Losses, start: Setting, constant: str, seeds: int) -> Setting:
    """Return the setting that one step of a constant, down or up, does not improve.

    Raises:
        ValueError: There is none within `2 * FAR` moves.
    """
    centre = start
    for _ in range(2 * FAR):
        settings = neighbours(centre, [constant])
        means = np.mean(losses(settings, seeds), axis=1)
        # Equal losses keep the centre, which is the first.
        best = settings[int(np.argmin(means))]
        if best == centre:
            return centre
        centre = best
    raise ValueError(f"no minimum of {constant} within {2 * FAR} moves of {dict(start)}")
