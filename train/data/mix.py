"""Mixtures of texts as a command line writes them: NAME=SOURCE:WEIGHT. Imports no JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from mupax.train.config.checks import check_place
from mupax.train.data.interface import DataError

NAME = "mix"
"""data.name of a mixture."""
BLOCK = 10_000
"""Examples that a mixture's shares are exact over; a share below one of them is none."""


class Part(NamedTuple):
    """One text of a mixture."""

    source: str
    """As a data.name: text:PATH, records:PATH, python_corpus or another text."""
    count: int
    """Examples of every `BLOCK`."""


def parts(words: Sequence[str], flag: str = "data.mix") -> dict[str, Part]:
    """Texts by name, in the order written; their counts, by largest remainders of the weights, add up to `BLOCK`.

    Args:
        words: NAME=SOURCE:WEIGHT each.
        flag: what an error calls them.

    Raises:
        DataError: a word of another form, a name twice, or a weight too small to be seen.
        ConfigError: a bucket that cannot be read.
    """
    sources, weights = {}, {}
    for word in words:
        name, equals, rest = word.partition("=")
        source, colon, number = rest.rpartition(":")
        weight = _number(number)
        if not (equals and colon and source and re.fullmatch(r"[\w.-]+", name)) or weight is None:
            raise DataError(
                f"{flag} {word} is not NAME=SOURCE:WEIGHT; write it as code=text:src:0.3"
            )
        if not 0 < weight < math.inf:
            raise DataError(
                f"{flag} {word} has weight {number}; write a number above 0, or leave it out"
            )
        if name in sources:
            raise DataError(f"{flag} has two texts named {name}; name one of them otherwise")
        if source.partition(":")[0] == NAME:
            raise DataError(f"{flag} {word} is a mixture in a mixture; write its texts in this one")
        check_place(f"{flag} {name}", source)
        sources[name], weights[name] = source, weight
    exact = {name: BLOCK * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: BLOCK - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if count == 0:
            raise DataError(
                f"{flag} {name} would be less than one example in {BLOCK:,}; leave it out"
            )
    return {name: Part(source, counts[name]) for name, source in sources.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
