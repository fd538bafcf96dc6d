"""Count models of bytes or of a few thousand tokens, the reference for a language model: what local statistics alone reach.

Interpolated Witten-Bell smoothing (Witten and Bell 1991; Chen and Goodman 1998, section 2.5). With c(h) the count of
a context h, t(h) the number of different bytes seen after it, and h' the context without its first byte:

    p(w | h) = (c(hw) + t(h) p(w | h')) / (c(h) + t(h)),      p(w | nothing) interpolated with 1/256, or 1/V of V tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mupax.train.data import cache
from mupax.train.data.interface import Reference

_NAMES = {3: "byte trigram", 4: "byte 4-gram"}
_MOST_BYTES = 1 << 25
_MOST_TARGETS = 1 << 24


def references(
    train: np.ndarray, eval_: np.ndarray, targets: np.ndarray, digest: str
) -> list[Reference]:
    """Uniform, trigram and 4-gram models, in nats per byte over the chosen evaluation bytes.

    Args:
        train: training text as bytes, [N] (the first 32 MB of it are counted).
        eval_: evaluation text as bytes, [M].
        targets: the bytes of `eval_` that are predicted, bool [M] (16 MB of them, evenly spread, if there are more).
        digest: of the data, to name the cached result.
    """

    def compute() -> dict[str, float]:
        positions = np.flatnonzero(targets)
        positions = positions[:: -(-len(positions) // _MOST_TARGETS)]
        losses = nats_per_byte(train[:_MOST_BYTES], eval_, positions, max(_NAMES))
        return {name: float(losses[order - 1].mean()) for order, name in _NAMES.items()}

    losses = cache.remembered(f"ngrams-{cache.digest(digest, targets.tobytes())}", compute)
    uniform = Reference("uniform", math.log(256), "nats/byte")
    return [uniform, *(Reference(name, losses[name], "nats/byte") for name in _NAMES.values())]


def nats_per_byte(
    train: np.ndarray, text: np.ndarray, positions: np.ndarray, order: int, vocab_size: int = 256
) -> list[np.ndarray]:
    """-ln p of chosen bytes, or tokens, of a text under the models of order 1, …, `order` counted on `train`.

    Args:
        train: bytes to count, [N].
        text: bytes, [M]; the context of a byte may reach back to its start, where it is shorter than the order allows.
        positions: which bytes of `text` to predict, [P], ascending.
        order: bytes per n-gram, 1 to 4.
        vocab_size: V, at most 65536, where they are tokens.

    Returns:
        float64 [P] per order.
    """
    if not 1 <= order <= 4 or vocab_size > 1 << 16:
        raise ValueError(
            f"order {order} of {vocab_size} tokens: a key holds 1 to 4 bytes, or as many of 65536 tokens"
        )
    p = np.full(len(positions), 1 / vocab_size)
    key: Any = np.uint32 if vocab_size <= 256 else np.uint64
    losses = []
    for n in range(1, order + 1):
        inside = positions >= n - 1
        if n <= len(train) and inside.any():
            grams, counts = np.unique(
                _keys(train, np.arange(n - 1, len(train)), n, key), return_counts=True
            )
            contexts, first, kinds = np.unique(
                _context(grams, n), return_index=True, return_counts=True
            )
            totals = np.add.reduceat(counts, first)
            keys = _keys(text, positions[inside], n, key)
            context = _context(keys, n)
            count, total = _lookup(grams, counts, keys), _lookup(contexts, totals, context)
            # A context never seen has t = 0: backing off alone is t = 1.
            kind = np.maximum(_lookup(contexts, kinds, context), 1)
            p = p.copy()
            p[inside] = (count + kind * p[inside]) / (total + kind)
        losses.append(-np.log(p))
    return losses


def _keys(text: np.ndarray, positions: np.ndarray, n: int, key: Any) -> np.ndarray:
    """The n bytes (tokens) of `text` that end at each position, as one number of the type `key`, [P]: a quarter of it each."""
    keys = np.zeros(len(positions), key)
    for i in range(n):
        keys = (keys << key(2 * keys.itemsize)) | text[positions - (n - 1 - i)].astype(key)
    return keys


def _context(keys: np.ndarray, n: int) -> np.ndarray:
    return keys >> keys.dtype.type(2 * keys.itemsize) if n > 1 else keys & keys.dtype.type(0)


def _lookup(sorted_keys: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """values where keys are among the sorted known ones, else 0."""
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == keys, values[at], 0)
