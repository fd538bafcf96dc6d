"""Text from any causal function of tokens: the whole context is read anew for every token, with one compiled shape.

What `train/reuse/generate/decode.py` does with a cache, without one: slow, and what the cache is held against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def sample(
    logits_fn: Callable[[np.ndarray], Any],
    prompt: np.ndarray,
    length: int,
    *,
    seq_len: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Continue a prompt by `length` tokens.

    The model always sees `seq_len` tokens, so it compiles once: a short text is padded on the right, which a causal
    model cannot see from the position that is read, and of a long one the last `seq_len` tokens are the context.

    Args:
        logits_fn: maps tokens, int32 [1, seq_len], to logits [1, seq_len, vocab]. Causal. A JAX array it returns must
            be readable by this process: on one host, or replicated.
        prompt: tokens to continue, integers [P], P >= 1.
        length: tokens to add.
        seq_len: context of the model.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens only; all unless given.
        seed: of the draws. The same seed gives the same tokens for the same logits.

    Returns:
        The prompt and its continuation, int32 [P + length].

    Raises:
        ValueError: an argument out of its range; the text says which.
        FloatingPointError: the logits are not numbers: the model has diverged.
    """
    prompt = np.asarray(prompt)
    if prompt.ndim != 1 or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"prompt must be integers of shape [P], P >= 1, not {prompt.dtype} of shape {prompt.shape}")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; write 0 for the likeliest token, or a positive number")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; write at least 1, or leave it out to draw among all tokens")
    rng = np.random.default_rng(seed)
    tokens = np.zeros(prompt.size + length, np.int32)
    tokens[: prompt.size] = prompt
    for end in range(prompt.size, tokens.size):
        context = tokens[max(0, end - seq_len) : end]
        window = np.zeros((1, seq_len), np.int32)
        window[0, : context.size] = context
        # Read on the device: one row of [seq_len, vocab] comes to the host, and its index is no part of a compiled program.
        logits = np.asarray(_row(logits_fn(window), np.int32(context.size - 1)), np.float64)
        tokens[end] = _draw(logits, temperature, top_k, rng)
    return tokens


@jax.jit
def _row(logits: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(logits[0], position, axis=0, keepdims=False)


def _draw(logits: np.ndarray, temperature: float, top_k: int | None, rng: np.random.Generator) -> int:
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise FloatingPointError("the logits hold nan or inf: the model has diverged, there is nothing to sample")
    if temperature == 0:
        return int(logits.argmax())
    # Ordered, so that exactly k are kept when logits tie.
    candidates = np.argsort(-logits, kind="stable")[:top_k]
    scaled = (logits[candidates] - logits.max()) / temperature
    weights = np.exp(scaled)
    return int(rng.choice(candidates, p=weights / weights.sum()))
