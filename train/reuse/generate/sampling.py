"""Drawing of tokens from logits: the likeliest one, or at random among the likely ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax import MupaxError


class DecodingError(MupaxError):
    """Error for a text that cannot be generated as requested. The message says what to write."""


SMALLEST_TEMPERATURE = 1e-30
"""Smallest divisor of the logits. Quotients of a smaller one can be too large for float32."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Rule for drawing a token from logits. The order is temperature, top-k, top-p.

    Raises:
        DecodingError: A value is out of its range.
    """

    temperature: float = 0.8
    """Divisor of the logits. 0 takes the likeliest token.

    A positive value below `SMALLEST_TEMPERATURE` becomes 0.
    """
    top_k: int | None = None
    """Draw only among the k likeliest tokens. Of tied tokens, those with lower ids count first."""
    top_p: float | None = None
    """Draw only among the fewest likeliest tokens with this total probability or more.

    Holtzman et al. 2020, nucleus sampling.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise DecodingError(
                f"temperature is {self.temperature}; write 0 for the likeliest token, or a "
                "positive number"
            )
        # Infinite quotients would tie, and the token with the lowest id would win.
        if self.temperature < SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k is not None and self.top_k < 1:
            raise DecodingError(
                f"top-k is {self.top_k}; write at least 1, or leave it out to draw among all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise DecodingError(
                f"top-p is {self.top_p}; write a probability above 0 and up to 1, or leave it out"
            )


class TracedSampling(NamedTuple):
    """Values of a `Sampling` as inputs of a program, so that one compilation serves them all."""

    temperature: Any
    """float32 []."""
    top_p: Any
    """float32 []. 1 keeps every token."""
    top_k: None = None

    @classmethod
    def of(cls, sampling: Sampling) -> TracedSampling:
        """Return the values of a sampling as arrays. It must have no top_k."""
        # top_k is the length of an array in the program, so it cannot be a traced input.
        assert sampling.top_k is None
        top_p = 1 if sampling.top_p is None else sampling.top_p
        return cls(np.float32(sampling.temperature), np.float32(top_p))


DEFAULT = Sampling()


def random_key(seed: int, impl: str | None = None) -> jax.Array:
    """Return the random key of a seed, which is a whole number from 0 of any size.

    Seeds below 2^32 have the key of `jax.random.key`.

    Args:
        impl: JAX's PRNG implementation, by default that of the process.
    """
    high, low = divmod(seed, 2**32)
    key = jax.random.key(low, impl=impl)
    # `jax.random.key` reads 32 bits alone, so that 2^32 would have the draws of 0.
    while high:
        high, word = divmod(high, 2**32)
        key = jax.random.fold_in(key, word)
    return key


def draw(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling | TracedSampling) -> jax.Array:
    """Draw one token per row, int32 [B].

    Args:
        logits_BV: float32 [batch, vocabulary].
        keys_B: One random key per row. Temperature 0 does not use them.
        sampling: How tokens are drawn. The same for all rows.
    """
    categorical = jax.vmap(jax.random.categorical)
    vocab_size = logits_BV.shape[-1]

    def take_likeliest() -> jax.Array:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw_among_all() -> jax.Array:
        return categorical(keys_B, logits_BV / sampling.temperature).astype(jnp.int32)

    def draw_among_likeliest() -> jax.Array:
        k = min(sampling.top_k or vocab_size, vocab_size)
        best_BK, ids_BK = jax.lax.top_k(logits_BV / sampling.temperature, k)
        if sampling.top_p is not None:
            # Probabilities are renormalized over the top_k tokens first, as in `transformers`.
            is_in_nucleus_BK = _likelier_mass(best_BK) < sampling.top_p
            best_BK = jnp.where(is_in_nucleus_BK, best_BK, -jnp.inf)
        index_B = categorical(keys_B, best_BK)
        return jnp.take_along_axis(ids_BK, index_B[:, None], axis=-1)[:, 0]

    if isinstance(sampling, TracedSampling):
        branches = (take_likeliest, draw_among_all, draw_among_likeliest)
        # A top_p of 1 keeps all tokens, so the vocabulary need not be sorted.
        random_branch = 1 + (sampling.top_p < 1).astype(jnp.int32)
        branch = jnp.where(sampling.temperature == 0, 0, random_branch)
        return jax.lax.switch(branch, branches)
    if sampling.temperature == 0:
        return take_likeliest()
    if sampling.top_k is None and sampling.top_p is None:
        return draw_among_all()
    return draw_among_likeliest()


def draw_each(
    logits_BV: jax.Array, keys_B: jax.Array, temperature_B: jax.Array, top_p_B: jax.Array
) -> jax.Array:
    """Draw one token per row, int32 [B], each row with its own sampling.

    A row's token does not depend on the other rows.

    Args:
        logits_BV: float32 [batch, vocabulary].
        keys_B: One random key per row. Greedy rows do not use theirs.
        temperature_B: float32. 0 takes the likeliest token.
        top_p_B: float32. 1 keeps every token.
    """
    greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    is_random_B = temperature_B > 0
    is_narrow_B = is_random_B & (top_p_B < 1)

    def draw_random() -> jax.Array:
        # Greedy rows divide by 1, because a division by 0 would give inf and nan. Their tokens are
        # replaced at the end.
        divisor_B = jnp.where(is_random_B, temperature_B, 1.0)
        scaled_BV = logits_BV / divisor_B[:, None]
        categorical = jax.vmap(jax.random.categorical)
        among_all_B = categorical(keys_B, scaled_BV).astype(jnp.int32)

        def draw_among_likeliest() -> jax.Array:
            best_BV, ids_BV = jax.lax.top_k(scaled_BV, scaled_BV.shape[-1])
            is_in_nucleus_BV = _likelier_mass(best_BV) < top_p_B[:, None]
            index_B = categorical(keys_B, jnp.where(is_in_nucleus_BV, best_BV, -jnp.inf))
            return jnp.take_along_axis(ids_BV, index_B[:, None], axis=-1)[:, 0]

        # Sorting the vocabulary can take longer than a small model's step.
        among_likeliest_B = jax.lax.cond(
            jnp.any(is_narrow_B), draw_among_likeliest, lambda: among_all_B
        )
        return jnp.where(is_narrow_B, among_likeliest_B, among_all_B)

    token_B = jax.lax.cond(jnp.any(is_random_B), draw_random, lambda: greedy_B)
    return jnp.where(is_random_B, token_B, greedy_B)


def _likelier_mass(sorted_BK: jax.Array) -> jax.Array:
    """Return, for each token, the total probability of all likelier tokens, [B, K].

    Args:
        sorted_BK: Logits [B, K], the largest first.
    """
    share_BK = jax.nn.softmax(sorted_BK, axis=-1)
    # Without the token's own share, so that the likeliest token is in every nucleus.
    return jnp.cumsum(share_BK, axis=-1) - share_BK
