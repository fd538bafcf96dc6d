"""Parser of text mixtures on the command line, such as `code=text:src:0.3 web=text:pages:0.7`.

Each word has the form NAME=SOURCE:WEIGHT. data.mix, `mupax data` and the tokenizer command use this
parser. It imports no JAX, so that commands start quickly.
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
"""Number of successive examples in which every text of a mixture has exactly its share.

The share of a text is rounded to a whole number of these examples, which must be at least 1.
"""


class Part(NamedTuple):
    """One text of a mixture."""

    source: str
    """Value of data.name: text:PATH, records:PATH, python_corpus or another text."""
    count: int
    """Number of this text's examples in every `BLOCK` examples of the mixture."""


def parts(words: Sequence[str], flag: str = "data.mix") -> dict[str, Part]:
    """Parse a mixture. Return its texts by name, in the order in which they are written.

    Weights are normalized and rounded by largest remainders, so that the counts add up to `BLOCK`.

    Args:
        words: Words of the command line, NAME=SOURCE:WEIGHT each, such as code=text:src:0.3.
        flag: Option that the words belong to, which error messages name.

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
    """Return weights by name as whole numbers that add up to `BLOCK`.

    The numbers are proportional to the weights, rounded by largest remainders.
    """
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
