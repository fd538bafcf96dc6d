"""How tokens are drawn: numbers from a command line, checked without JAX. `train/reuse/generate/decode.py` draws."""

from __future__ import annotations

import math
from typing import NamedTuple

from mupax.errors import MupaxError


class DecodingError(MupaxError):
    """A text that cannot be made as asked. The text says what to write instead."""


class Sampling(NamedTuple):
    """How a token is drawn from logits. Filters apply in this order: temperature, top-k, top-p."""

    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only: of tied ones those of lower number."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have at least this probability together (Holtzman et al. 2020)."""

    def check(self) -> None:
        """Raises DecodingError where a number is out of its range."""
        if not 0 <= self.temperature < math.inf:
            raise DecodingError(
                f"temperature is {self.temperature}; write 0 for the likeliest token, or a positive number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise DecodingError(f"top-k is {self.top_k}; write at least 1, or leave it out to draw among all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise DecodingError(f"top-p is {self.top_p}; write a probability above 0 and up to 1, or leave it out")
