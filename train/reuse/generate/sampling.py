"""How a token is drawn from logits: the likeliest, or by chance among the likely ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax.errors import MupaxError


class DecodingError(MupaxError):
    """A text that cannot be made as asked. The text says what to write instead."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits. Filters apply in this order: temperature, top-k, top-p.

    Raises:
        DecodingError: a number out of its range.
    """

    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only: of tied ones those of lower number."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have at least this probability together (Holtzman et al. 2020)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise DecodingError(
                f"temperature is {self.temperature}; write 0 for the likeliest token, or a positive number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise DecodingError(
                f"top-k is {self.top_k}; write at least 1, or leave it out to draw among all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise DecodingError(
                f"top-p is {self.top_p}; write a probability above 0 and up to 1, or leave it out"
            )


class AnySampling(NamedTuple):
    """A `Sampling` whose numbers are data of a program and no constants in it: one compilation serves all of them."""

    temperature: Any
    """float32 []."""
    top_p: Any
    """float32 []; 1 keeps every token."""
    top_k: None = None

    @classmethod
    def of(cls, sampling: Sampling) -> AnySampling:
        """The numbers of a sampling without top_k, which is of a program's shapes."""
        assert sampling.top_k is None
        return cls(
            np.float32(sampling.temperature),
            np.float32(1 if sampling.top_p is None else sampling.top_p),
        )


DEFAULT = Sampling()


def draw(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling | AnySampling) -> jax.Array:
    """A token per row, int32 [B]; each row with a key of its own.

    Args:
        logits_BV: float32 [batch, vocabulary].
        keys_B: random keys.
        sampling: how tokens are drawn from them; at temperature 0 without keys.
    """
    categorical, vocab = jax.vmap(jax.random.categorical), logits_BV.shape[-1]

    def likeliest() -> jax.Array:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def among_all() -> jax.Array:
        return categorical(keys_B, logits_BV / sampling.temperature).astype(jnp.int32)

    def among_likeliest() -> jax.Array:
        best_BK, ids_BK = jax.lax.top_k(
            logits_BV / sampling.temperature, min(sampling.top_k or vocab, vocab)
        )
        if sampling.top_p is not None:
            share_BK = jax.nn.softmax(best_BK, axis=-1)
            likelier_BK = jnp.cumsum(share_BK, axis=-1) - share_BK
            best_BK = jnp.where(likelier_BK < sampling.top_p, best_BK, -jnp.inf)
        picked_B = categorical(keys_B, best_BK)
        return jnp.take_along_axis(ids_BK, picked_B[:, None], axis=-1)[:, 0]

    ways = (likeliest, among_all, among_likeliest)
    if isinstance(sampling, AnySampling):
        by_chance = 1 + (sampling.top_p < 1).astype(jnp.int32)
        return jax.lax.switch(jnp.where(sampling.temperature == 0, 0, by_chance), ways)
    if sampling.temperature == 0:
        return likeliest()
    return among_all() if sampling.top_k is None and sampling.top_p is None else among_likeliest()


def draw_each(
    logits_BV: jax.Array, keys_B: jax.Array, temperature_B: jax.Array, top_p_B: jax.Array
) -> jax.Array:
    """Draw a token per row, int32 [B], each row by its own sampling. A row's token does not depend on the other rows.

    Args:
        logits_BV: float32 [batch, vocabulary].
        keys_B: random keys.
        temperature_B: float32; 0 takes the likeliest token.
        top_p_B: float32; 1 keeps every token.
    """
    greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    warm_B = temperature_B > 0
    narrow_B = warm_B & (top_p_B < 1)

    def by_chance() -> jax.Array:
        scaled_BV = logits_BV / jnp.where(warm_B, temperature_B, 1.0)[:, None]
        categorical = jax.vmap(jax.random.categorical)
        among_all_B = categorical(keys_B, scaled_BV).astype(jnp.int32)

        def among_likeliest() -> jax.Array:
            best_BV, ids_BV = jax.lax.top_k(scaled_BV, scaled_BV.shape[-1])
            share_BV = jax.nn.softmax(best_BV, axis=-1)
            likelier_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
            nucleus_BV = jnp.where(likelier_BV < top_p_B[:, None], best_BV, -jnp.inf)
            picked_B = categorical(keys_B, nucleus_BV)
            return jnp.take_along_axis(ids_BV, picked_B[:, None], axis=-1)[:, 0]

        # Sorting a vocabulary takes longer than a small model's step.
        likeliest_B = jax.lax.cond(jnp.any(narrow_B), among_likeliest, lambda: among_all_B)
        return jnp.where(narrow_B, likeliest_B, among_all_B)

    drawn_B = jax.lax.cond(jnp.any(warm_B), by_chance, lambda: greedy_B)
    return jnp.where(warm_B, drawn_B, greedy_B)
