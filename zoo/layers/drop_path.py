"""Drop path (stochastic depth, Huang et al. 2016): factors that leave out residual branches.

A training step draws the factors from (seed, step, row of the global batch). They are therefore the
same after a resume and on any mesh. Evaluations leave nothing out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BRANCHES = 2
"""Number of branches of a block, attention and MLP. Each is dropped independently, as in timm."""
_STREAM = 0x64726F70
"""Number folded into the key, so that drop path does not reuse draws of the initialization."""


class Drop(NamedTuple):
    """Seed and rates of drop path, which the compiled training step gets as arrays."""

    seed: Any
    """uint32 []."""
    rates: Any
    """Probability that a branch of each block is left out, float32 [layers]."""


def scales(drop: Drop, step: jax.Array, batch_size: int) -> jax.Array:
    """Return the factor on every residual branch, float32 [batch_size, layers, BRANCHES].

    A factor is 0 for a branch that is left out, otherwise 1 / (1 - rate).

    Args:
        step: Number of finished optimizer steps, int32 [].
        batch_size: Number of examples in the global batch.
    """
    key = jax.random.key(drop.seed)
    key = jax.random.fold_in(key, _STREAM)
    key = jax.random.fold_in(key, step)
    # Dividing by the probability of being kept preserves the expectation of a branch.
    keep_probability = 1 - drop.rates[:, None]
    shape = (batch_size, drop.rates.shape[0], BRANCHES)
    keep_mask = jax.random.uniform(key, shape) < keep_probability
    return jnp.where(keep_mask, 1 / keep_probability, 0.0)
