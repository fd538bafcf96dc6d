"""Points of a study: grids of numbers as people write them (2^-12:2^-4:9, or 0.001,0.003,0.01), and runs at them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from mupax.train.config.run import Config


MOST_DIGITS = 4
"""Of a grid's count."""


def parse(text: str) -> tuple[float, ...]:
    """The numbers of a grid, in the order written.

    Args:
        text: START:STOP:COUNT, so many numbers from one to the other in equal ratios, or numbers with commas between; a
            number may be a power such as 2^-7.5.

    Raises:
        ConfigError: anything else.
    """
    parts = text.split(":")
    if len(parts) == 1:
        return tuple(_number(word, text) for word in text.split(","))
    count_word = parts[-1].strip()
    # The superscript two is a digit that `int` does not read, and a count of ten digits fills the memory.
    is_count = count_word.isdecimal() and len(count_word) <= MOST_DIGITS and int(count_word) >= 2
    if len(parts) != 3 or not is_count:
        raise ConfigError(
            f"grid {text!r}: write START:STOP:COUNT with a count from 2 to {10**MOST_DIGITS - 1}, as 2^-12:2^-4:9"
        )
    start, stop, count = _number(parts[0], text), _number(parts[1], text), int(parts[2])
    if start <= 0 or stop <= 0:
        raise ConfigError(
            f"grid {text!r} goes in equal ratios and needs numbers above 0; write them one by one, as 0,0.1"
        )
    low, high = math.log2(start), math.log2(stop)
    # Through the exponents: a grid of powers of two is made of exact powers of two.
    return tuple(2.0 ** (low + (high - low) * i / (count - 1)) for i in range(count))


def span(text: str) -> tuple[float, float]:
    """The ends of a range written LOW:HIGH; raises ConfigError for anything else."""
    low, colon, high = text.partition(":")
    if not colon or ":" in high:
        raise ConfigError(f"range {text!r}: write LOW:HIGH, as 2^-3:2^3")
    return _number(low, text), _number(high, text)


def power(value: float) -> str:
    """A number as a power of two: 2^-7.5; the number itself where it is none of a half-octave grid."""
    if value > 0 and math.isfinite(value):
        exponent = math.log2(value)
        if abs(exponent * 2 - round(exponent * 2)) < 1e-6:
            return f"2^{round(exponent * 2) / 2:g}"
    return f"{value:.3g}"


def _number(word: str, text: str) -> float:
    base, hat, exponent = word.strip().partition("^")
    try:
        value = float(base) ** float(exponent) if hat else float(base)
    except (ValueError, ZeroDivisionError, OverflowError):
        value = math.nan
    if isinstance(value, complex) or not math.isfinite(value):
        raise ConfigError(
            f"grid {text!r}: {word.strip()!r} is not a number; write one such as 0.001 or 2^-10"
        )
    return value


@dataclasses.dataclass(frozen=True)
class Planned:
    """A point: the size that grew (0 where none did), what else was varied in words, and its config."""

    size: int
    varied: str
    label: str
    config: Config


def at_rate(config: Config, peak_lr: float) -> Config:
    """Return the run at another peak learning rate."""
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, peak_lr=peak_lr)
    )


def point(config: Config, peak_lr: float, seed: int) -> Config:
    """Return the run at a rate and from a seed, on the batches of the run itself.

    Args:
        config: of the run.
        peak_lr: of the point.
        seed: of its initialization.
    """
    data = dataclasses.replace(config.data, seed=config.data_seed)
    return dataclasses.replace(at_rate(config, peak_lr), seed=seed, data=data)


def without_flags(words: Sequence[str], flags: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command without some flags, and what these had: flag to value.

    Args:
        words: of the command.
        flags: each with one value, which stands behind it or behind its `=`.
    """
    rest: list[str] = []
    values: dict[str, str] = {}
    following = iter(words)
    for word in following:
        flag, equals, value = word.partition("=")
        if flag in flags:
            values[flag] = value if equals else next(following, "")
        else:
            rest.append(word)
    return rest, values
