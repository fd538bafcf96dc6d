"""Muon whose iterations are left where the compiler puts them, for controls."""

from __future__ import annotations

from typing import Any

import jax

from mupax.train.core.muon import newton_schulz, sides


def split_steps(
    arrays: Any, specs: Any, *, layout: Any, vectors: Any = None, **_: Any
) -> tuple[dict[str, jax.Array], Any]:
    """Orthogonalize matrices as `mupax.train.core.muon.matrix_steps` does, without exchanges.

    Devices keep their parts of each matrix, so that products of the iterations are split.
    """
    results = {}
    for name, array in arrays.items():
        order = sides(specs[name], layout).order
        shape = [array.shape[i] for i in order]
        # Attention's matrices are cut between their last two axes, which is enough for a control.
        flat = array.transpose(order).reshape(-1, *shape[-2:])
        orthogonal = jax.vmap(newton_schulz)(flat)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        results[name] = orthogonal.reshape(shape).transpose(inverse)
    return results, vectors
