"""This process' part of every global batch: which rows it makes, and how all parts become one array over all devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mupax.train.parallel.sharding import MeshLayout
from mupax.zoo.families import ModelConfig


class Feed:
    """Batches of one shape on their way to a mesh.

    A process makes the rows that its own devices hold, and no others: one run of rows or several, depending on where its
    devices lie in the mesh. Processes that split positions or heads make the same rows.

    Args:
        abstract: shapes of the global batch.
        layout: how it lies on the mesh.
    """

    def __init__(self, abstract: Mapping[str, Any], layout: MeshLayout) -> None:
        self.abstract = dict(abstract)
        """Shapes of the global batch."""
        self._shapes = {name: leaf.shape for name, leaf in abstract.items()}
        self._shardings = layout.batch(abstract)
        name, shape = next(iter(self._shapes.items()))
        held = self._shardings[name].addressable_devices_indices_map(shape).values()
        starts = sorted({index[0].indices(shape[0])[:2] for index in held if index is not None})
        self._offsets: dict[int, int] = {}
        """Where a run of rows of the global batch begins among this process' rows."""
        parts: list[slice] = []
        count = 0
        for start, stop in starts:
            self._offsets[start] = count
            count += stop - start
            if parts and parts[-1].stop == start:
                parts[-1] = slice(parts[-1].start, stop)
            else:
                parts.append(slice(start, stop))
        self.rows = tuple(parts)
        """Rows of the global batch that this process makes, in this order."""

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The global batch on the mesh, from this process' rows of it."""
        if jax.process_count() == 1:
            return jax.device_put(dict(batch), self._shardings)
        return {name: self._assembled(name, array) for name, array in batch.items()}

    def _assembled(self, name: str, array: np.ndarray) -> jax.Array:
        size = self._shapes[name][0]

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(size)
            first = self._offsets[start]
            return array[first : first + stop - start][(slice(None), *index[1:])]

        return jax.make_array_from_callback(self._shapes[name], self._shardings[name], part)


def abstract_batch(model: ModelConfig, batch_size: int) -> dict[str, Any]:
    """Shapes of a batch of the model's examples."""
    example = model.example().items()
    return {name: jax.ShapeDtypeStruct((batch_size, *of.shape), jax.numpy.dtype(of.dtype)) for name, of in example}  # pyright: ignore
