"""The order of training examples: a new random permutation every epoch, computed index by index.

Nothing is stored and nothing is skipped through: example i of the run is found in constant time for any i, so batch
10^6 of a resumed run costs what batch 0 costs. The permutation is grain's index shuffle (a block cipher on indices).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ORDER, WINDOWS, AUGMENTATION, EVALUATION, NOISE, MIXTURE, RANDAUG, MIXING, POOLS = range(9)
"""Purposes of random numbers; each draws from a stream of its own."""


def rng(seed: int, purpose: int, *index: int) -> np.random.Generator:
    """Random numbers that depend on the run's seed, what they are for, and an index.

    Args:
        seed: of the data, at least 0.
        purpose: which stream, such as `AUGMENTATION`.
        *index: of the batch, the epoch or the like; each has a stream of its own.
    """
    return np.random.default_rng([seed, purpose, *index])


class Shuffle:
    """Epochs 0, 1, 2, … over `size` examples, each in its own random order.

    Args:
        size: examples per epoch.
        seed: seed of the run; two runs of neighbouring seeds share no epoch's order.
        purpose: which stream of random numbers to use.
    """

    def __init__(self, size: int, seed: int, purpose: int = ORDER) -> None:
        import grain

        self.size = size
        # grain takes seed + epoch for each epoch: hash first, or run 1 would repeat run 0 from its second epoch.
        mixed = int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0])
        self._shuffled = grain.MapDataset.range(size).shuffle(seed=mixed)

    def __call__(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, position) of the run's examples `indices`: both int64, positions in [0, size)."""
        i = np.fromiter(indices, np.int64)
        return i // self.size, np.fromiter((self._shuffled[int(j)] for j in i), np.int64, len(i))


def batch_indices(k: int, batch_size: int, rows: slice) -> range:
    """Indices, counted from the start of the run, of the given rows of batch k.

    Args:
        k: from 0.
        batch_size: rows of the global batch.
        rows: of the global batch.
    """
    return range(k * batch_size, (k + 1) * batch_size)[rows]
