"""Points of a study: grids of numbers as typed (`2^-12:2^-4:9`), and a run's config at a point.

Sweeps, transfer studies, tunings and forecasts read their numbers and make their configs here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from mupax.train.config.run import Config


MOST_DIGITS = 4
"""Largest number of digits of COUNT in a grid START:STOP:COUNT."""


def parse(text: str) -> tuple[float, ...]:
    """Return the numbers of a grid, in the order in which they are written.

    Args:
        text: `START:STOP:COUNT`, which is COUNT numbers from START to STOP in equal ratios, or
            numbers separated by commas. A number may be a power, as in `2^-7.5`.

    Raises:
        ConfigError: `text` has neither form, COUNT is not from 2 to 9999, or START or STOP is not
            above 0.
    """
    parts = text.split(":")
    if len(parts) == 1:
        return tuple(_number(word, text) for word in text.split(","))

    count_word = parts[-1].strip()
    # `isdecimal`, because `isdigit` is True for a superscript two, which `int` does not read. A
    # count of ten digits would fill the memory.
    is_count = count_word.isdecimal() and len(count_word) <= MOST_DIGITS and int(count_word) >= 2
    if len(parts) != 3 or not is_count:
        raise ConfigError(
            f"grid {text!r}: write START:STOP:COUNT with a count from 2 to {10**MOST_DIGITS - 1}, "
            "as 2^-12:2^-4:9"
        )

    start = _number(parts[0], text)
    stop = _number(parts[1], text)
    count = int(parts[2])
    if start <= 0 or stop <= 0:
        raise ConfigError(
            f"grid {text!r} goes in equal ratios and needs numbers above 0; write them one by one, "
            "as 0,0.1"
        )

    # Computed from exponents, so that a grid of powers of two has exact powers of two.
    first = math.log2(start)
    last = math.log2(stop)
    values = []
    for i in range(count):
        values.append(2.0 ** (first + (last - first) * i / (count - 1)))
    return tuple(values)


def span(text: str) -> tuple[float, float]:
    """Return the ends of a range that is written as `LOW:HIGH`.

    The ends may be powers, as in `2^-3:2^3`. LOW is not checked to be below HIGH.

    Raises:
        ConfigError: `text` does not have this form, or an end is no finite number.
    """
    low, colon, high = text.partition(":")
    if not colon or ":" in high:
        raise ConfigError(f"range {text!r}: write LOW:HIGH, as 2^-3:2^3")
    return _number(low, text), _number(high, text)


def power(value: float) -> str:
    """Format a number of a half-octave grid as a power of two, such as 2^-7.5.

    Other numbers get three significant digits.
    """
    if value > 0 and math.isfinite(value):
        half_octaves = math.log2(value) * 2
        nearest = round(half_octaves)
        if abs(half_octaves - nearest) < 1e-6:
            return f"2^{nearest / 2:g}"
    return f"{value:.3g}"


def _number(word: str, text: str) -> float:
    """Return the number that `word` writes, alone or as BASE^EXPONENT.

    Args:
        text: Grid that has the word, for the message of an error.

    Raises:
        ConfigError: `word` is no finite real number.
    """
    base, hat, exponent = word.strip().partition("^")
    try:
        value = float(base)
        if hat:
            value = value ** float(exponent)
    except (ValueError, ZeroDivisionError, OverflowError):
        value = math.nan
    # A negative base with a fractional exponent is a complex number.
    if isinstance(value, complex) or not math.isfinite(value):
        raise ConfigError(
            f"grid {text!r}: {word.strip()!r} is not a number; write one such as 0.001 or 2^-10"
        )
    return value


@dataclasses.dataclass(frozen=True)
class Planned:
    """Point of a sweep, one run that is to be trained.

    Attributes:
        size: Value of the size that grows; 0 if no size grows.
        varied: Values of `--vary`, such as "gamma0 0.5"; "" without them.
        label: Size and varied values, for a person.
        config: Complete run of the point.
    """

    size: int
    varied: str
    label: str
    config: Config


def at_rate(config: Config, peak_lr: float) -> Config:
    """Return a copy of a run's config with the peak learning rate `peak_lr`."""
    optimizer = dataclasses.replace(config.optimizer, peak_lr=peak_lr)
    return dataclasses.replace(config, optimizer=optimizer)


def point(config: Config, peak_lr: float, seed: int) -> Config:
    """Return a copy of a run's config with another peak learning rate and initialization seed.

    The batches stay the same.

    Args:
        seed: Seed of the initialization. The data keep the seed that they have in `config`.
    """
    data = dataclasses.replace(config.data, seed=config.data_seed)
    return dataclasses.replace(at_rate(config, peak_lr), seed=seed, data=data)


def without_flags(words: Sequence[str], flags: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Remove flags from the words of a command, and return the other words and the flags' values.

    Args:
        flags: Flags that take one value, which is the next word or stands behind a `=`.

    Returns:
        Words that are left, and the last value of each flag that occurred, as text, by the flag.
    """
    remaining: list[str] = []
    values: dict[str, str] = {}
    word_iterator = iter(words)
    for word in word_iterator:
        flag, equals, value = word.partition("=")
        if flag not in flags:
            remaining.append(word)
        elif equals:
            values[flag] = value
        else:
            values[flag] = next(word_iterator, "")
    return remaining, values
