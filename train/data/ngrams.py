"""Count models of bytes, the reference for a byte-level language model: what local statistics alone reach.

Interpolated Witten-Bell smoothing (Witten and Bell 1991; Chen and Goodman 1998, section 2.5). With c(h) the count of
a context h, t(h) the number of different bytes seen after it, and h' the context without its first byte:

    p(w | h) = (c(hw) + t(h) p(w | h')) / (c(h) + t(h)),      p(w | nothing) interpolated with 1/256.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from train.data import cache
from train.data.interface import Reference

if TYPE_CHECKING:
    import numpy as np

_NAMES = {3: "byte trigram", 4: "byte 4-gram"}
_MOST_BYTES = 1 << 27


def references(train: np.ndarray, eval_: np.ndarray, targets: np.ndarray, digest: str) -> list[Reference]:
    """Uniform, trigram and 4-gram models, in nats per byte over the chosen evaluation bytes.

    Args:
        train: training text as bytes, [N] (the first 128 MB of it are counted).
        eval_: evaluation text as bytes, [M].
        targets: the bytes of `eval_` that are predicted, bool [M]; the context may reach back to any byte before.
        digest: of the data, to name the cached result.
    """

    def compute() -> dict[str, float]:
        losses = nats_per_byte(train[:_MOST_BYTES], eval_, max(_NAMES))
        return {name: float(losses[order - 1][targets].mean()) for order, name in _NAMES.items()}

    found = cache.remembered(f"ngrams-{cache.digest(digest, targets.tobytes())}", compute)
    uniform = Reference("uniform", math.log(256), "nats/byte")
    return [uniform, *(Reference(name, found[name], "nats/byte") for name in _NAMES.values())]


def nats_per_byte(train: np.ndarray, eval_: np.ndarray, order: int) -> list[np.ndarray]:
    """-ln p of every byte of `eval_` under the models of order 1, …, `order` counted on `train`: float64 [M] each.

    The first bytes, which have too short a context, are predicted by the model of the order that they allow.
    """
    import numpy as np

    if not 1 <= order <= 4:
        raise ValueError(f"order {order}: a 32-bit key holds 1 to 4 bytes")
    p = np.full(len(eval_), 1 / 256)
    losses = []
    for n in range(1, min(order, len(train), len(eval_)) + 1):
        grams, counts = np.unique(_keys(train, n), return_counts=True)
        contexts, first, kinds = np.unique(_context(grams, n), return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        keys = _keys(eval_, n)
        seen = _lookup(grams, counts, keys)
        total = _lookup(contexts, totals, _context(keys, n))
        # A context never seen has t = 0: backing off alone is t = 1.
        kind = np.maximum(_lookup(contexts, kinds, _context(keys, n)), 1)
        p = p.copy()
        p[n - 1 :] = (seen + kind * p[n - 1 :]) / (total + kind)
        losses.append(-np.log(p))
    return losses + losses[-1:] * (order - len(losses))


def _keys(text: np.ndarray, n: int) -> np.ndarray:
    """The n bytes that end at each position from n - 1 on, as one uint32 [len(text) - n + 1]."""
    import numpy as np

    keys = np.zeros(len(text) - n + 1, np.uint32)
    for i in range(n):
        keys = (keys << np.uint32(8)) | text[i : len(text) - n + 1 + i]
    return keys


def _context(keys: np.ndarray, n: int) -> np.ndarray:
    return keys >> 8 if n > 1 else keys & 0


def _lookup(known: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """values where keys are among the sorted known ones, else 0."""
    import numpy as np

    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, values[at], 0)
