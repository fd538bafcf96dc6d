"""Parser of mixtures on the command line, NAME=SOURCE:WEIGHT each. Imports no JAX.

data.mix, `mupax data` and the tokenizer command read mixtures with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from mupax.train.config.checks import check_place
from mupax.train.data.interface import DataError

NAME = "mix"
"""Value of data.name for a mixture."""
BLOCK = 10_000
"""Number of examples over which shares are exact. Each text must have one of them at least."""


class Part(NamedTuple):
    """One text of a mixture."""

    source: str
    """Value of data.name: text:PATH, records:PATH, python_corpus or another text."""
    count: int
    """Number of examples out of `BLOCK`."""


def parts(words: Sequence[str], flag: str = "data.mix") -> dict[str, Part]:
    """Return the texts of a mixture by name, in the order in which they are written.

    Weights are normalized and rounded by largest remainders, so that the counts add up to `BLOCK`.

    Args:
        words: Texts, NAME=SOURCE:WEIGHT each, such as code=text:src:0.3.
        flag: Name of the words in error messages.

    Raises:
        DataError: A word has another form, a name occurs twice, or a weight is too small to count.
        ConfigError: A source is in a bucket that cannot be read.
    """
    sources: dict[str, str] = {}
    weights: dict[str, float] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        # From the right, because a source such as text:PATH has a colon of its own.
        source, colon, number = rest.rpartition(":")
        weight = _number(number)
        is_complete = equals and colon and source and re.fullmatch(r"[\w.-]+", name)
        if not is_complete or weight is None:
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
        sources[name] = source
        weights[name] = weight

    counts = _counts(weights)
    for name, count in counts.items():
        if count == 0:
            raise DataError(
                f"{flag} {name} would be less than one example in {BLOCK:,}; leave it out"
            )
    return {name: Part(source, counts[name]) for name, source in sources.items()}


def _counts(weights: dict[str, float]) -> dict[str, int]:
    """Return whole numbers in proportion to the weights that add up to `BLOCK`."""
    exact = {}
    for name, weight in weights.items():
        exact[name] = BLOCK * weight / sum(weights.values())
    counts = {name: int(share) for name, share in exact.items()}
    # The largest remainder first, because it lost the most by rounding down.
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: BLOCK - sum(counts.values())]:
        counts[name] += 1
    return counts


def _number(text: str) -> float | None:
    """Return a text as a number, or None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None
