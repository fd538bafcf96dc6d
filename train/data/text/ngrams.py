"""N-gram count models of bytes or tokens, the reference losses of a language model.

The models use interpolated Witten-Bell smoothing (Witten and Bell 1991; Chen and Goodman 1998,
section 2.5). With c(h) the count of a context h, t(h) the number of different tokens that follow h
in training, and h' the context h without its first token:

    p(w | h) = (c(hw) + t(h) p(w | h')) / (c(h) + t(h))

The empty context is interpolated with 1/V. V is 256 for bytes.
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
    """Return the losses of a uniform, a trigram and a 4-gram model of bytes, in nats per byte.

    They are shown next to the loss of a trained model. The losses are means over the predicted
    bytes, and are cached on disk.

    Args:
        train: Training text as bytes, [N]. The first 32 MiB are counted.
        eval_: Evaluation text as bytes, [M].
        targets: Mask of the bytes of `eval_` that are predicted, bool [M]. At most 16 Mi of them
            are used, evenly spread.
        digest: Digest of the data, part of the name of the cached result.
    """

    def compute() -> dict[str, float]:
        positions = np.flatnonzero(targets)
        # Rounded up, so that at most `_MOST_TARGETS` positions are left.
        stride = -(-len(positions) // _MOST_TARGETS)
        positions = positions[::stride]
        losses = nats_per_byte(train[:_MOST_BYTES], eval_, positions, max(_NAMES))
        means = {}
        for order, name in _NAMES.items():
            means[name] = float(losses[order - 1].mean())
        return means

    key = cache.digest(digest, targets.tobytes())
    losses = cache.remembered(f"ngrams-{key}", compute)
    uniform = Reference("uniform", math.log(256), "nats/byte")
    return [uniform, *(Reference(name, losses[name], "nats/byte") for name in _NAMES.values())]


def nats_per_byte(
    train: np.ndarray, text: np.ndarray, positions: np.ndarray, order: int, vocab_size: int = 256
) -> list[np.ndarray]:
    """Return -ln p of some bytes or tokens of a text under n-gram models of several orders.

    Args:
        train: Training text as bytes or ids, whose n-grams are counted, [N].
        text: Text to predict, as bytes or ids, [M]. A position near the beginning has a shorter
            context.
        positions: Positions in `text` that are predicted, ascending, [P].
        order: Largest n, from 1 to 4.
        vocab_size: V, number of different bytes or ids, at most 65536. The default is 256.

    Returns:
        List of float64 arrays [P], for n = 1 to `order`.

    Raises:
        ValueError: `order` or `vocab_size` is out of range.
    """
    if not 1 <= order <= 4 or vocab_size > 1 << 16:
        raise ValueError(
            f"order {order} of {vocab_size} tokens: "
            "a key holds 1 to 4 bytes, or as many of 65536 tokens"
        )
    probs = np.full(len(positions), 1 / vocab_size)
    key_type: Any = np.uint32 if vocab_size <= 256 else np.uint64
    losses = []
    for n in range(1, order + 1):
        # A position with fewer tokens before it keeps the probability of the lower order.
        has_context = positions >= n - 1
        if n <= len(train) and has_context.any():
            train_keys = _keys(train, np.arange(n - 1, len(train)), n, key_type)
            grams, gram_counts = np.unique(train_keys, return_counts=True)
            contexts, first, num_followers = np.unique(
                _context(grams, n), return_index=True, return_counts=True
            )
            # The n-grams are sorted, so those of one context are adjacent.
            context_counts = np.add.reduceat(gram_counts, first)

            keys = _keys(text, positions[has_context], n, key_type)
            context = _context(keys, n)
            c_hw = _lookup(grams, gram_counts, keys)
            c_h = _lookup(contexts, context_counts, context)
            # A context that is not in `train` has t = 0. With t = 1 it backs off to p(w | h').
            t_h = np.maximum(_lookup(contexts, num_followers, context), 1)
            probs = probs.copy()
            probs[has_context] = (c_hw + t_h * probs[has_context]) / (c_h + t_h)
        losses.append(-np.log(probs))
    return losses


def _keys(text: np.ndarray, positions: np.ndarray, n: int, key_type: Any) -> np.ndarray:
    """Return each n-gram of `text` that ends at one of the positions, packed into one number, [P].

    Each byte or token has a quarter of the bits of the number. The last one has the lowest bits.

    Args:
        positions: Positions of the last byte or token of the n-grams, each at least n - 1, [P].
        n: Number of bytes or tokens in an n-gram, 1 to 4.
        key_type: NumPy type of the numbers, uint32 for bytes and uint64 for tokens.
    """
    keys = np.zeros(len(positions), key_type)
    # A key has 8 * itemsize bits, and a quarter of them is 2 * itemsize.
    shift = key_type(2 * keys.itemsize)
    for i in range(n):
        tokens = text[positions - (n - 1 - i)]
        keys = (keys << shift) | tokens.astype(key_type)
    return keys


def _context(keys: np.ndarray, n: int) -> np.ndarray:
    """Return n-grams without their last token, packed as by `_keys`. A 1-gram has the context 0.

    Args:
        keys: Results of `_keys`.
        n: Number of bytes or tokens in these n-grams.
    """
    if n > 1:
        return keys >> keys.dtype.type(2 * keys.itemsize)
    return keys & keys.dtype.type(0)


def _lookup(sorted_keys: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the value of each of `keys` in a table, or 0 for a key that is not in the table.

    Args:
        sorted_keys: Keys of the table, ascending and without duplicates.
        values: Values of the table in the order of its keys.
    """
    indices = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[indices] == keys, values[indices], 0)
