"""A pattern search: the least loss among a setting and its neighbours, moved to until the setting is the least of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Setting = tuple[tuple[str, int], ...]
Losses = Callable[[Sequence[Setting], int], np.ndarray]
"""Settings [n] and a number of seeds to losses float64 [n, seeds], inf where a point diverged."""
FAR = 12
"""Moves after which a search ends in an error: a loss that falls forever is no minimum."""


def setting(values: Mapping[str, int]) -> Setting:
    """The same, to be a key."""
    return tuple(sorted((name, value) for name, value in values.items() if value))


def neighbours(centre: Setting, constants: Sequence[str]) -> list[Setting]:
    """The centre, and it with each constant one step up and down.

    Args:
        centre: a setting.
        constants: to move.
    """
    values = dict(centre)
    moved = [{**values, name: values.get(name, 0) + side} for name in constants for side in (-1, 1)]
    return [centre, *map(setting, moved)]


def descend(
    losses: Losses,
    start: Setting,
    constants: Sequence[str],
    seeds: int,
    final: int,
    finalists: int | None = None,
) -> Setting:
    """The setting whose mean loss over seeds is the least of its neighbours'.

    Moves are decided on `seeds` seeds; where they end, the same is asked of `final` seeds, and if they say otherwise the search goes
    on with those. With `finalists` that question is asked of the best few alone and ends the search, which costs a third.

    Args:
        losses: trains points.
        start: first setting.
        constants: to search.
        seeds: of the first moves.
        final: of the last, at least `seeds`.
        finalists: settings that `final` seeds decide between; None: the centre and all of its neighbours, and on from there.

    Raises:
        ValueError: no minimum within `FAR` moves.
    """
    at, count, visited = start, seeds, {start}
    for _ in range(2 * FAR):
        cross = neighbours(at, constants)
        means = np.mean(losses(cross, count), axis=1)
        best = cross[int(np.argmin(means))]
        if (
            best == at or best in visited
        ):  # with more seeds it would go back and forth between equals
            if count >= final:
                return best if means.min() < means[0] else at
            if finalists is not None:
                last = [cross[index] for index in np.argsort(means, kind="stable")[:finalists]]
                return last[int(np.argmin(np.mean(losses(last, final), axis=1)))]
            count, visited = final, {at}
            continue
        at = best
        visited.add(at)
    raise ValueError(f"no minimum within {2 * FAR} moves of {dict(start)}: the last was {dict(at)}")
