"""Drop path (stochastic depth, Huang et al. 2016): a training step leaves out branches of the residual stack, example by example.

Which, is a function of (seed, step, row of the global batch): the same after a resume and on any mesh. What is kept is divided by
the chance that it is, so a branch's expectation stays. An evaluation leaves nothing out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BRANCHES = 2
"""Of a block: attention and MLP, each left out by itself, as in timm."""
_STREAM = 0x64726F70
"""Keeps these random numbers apart from those that initialize."""


class Drop(NamedTuple):
    """How often branches are left out, as data of the step."""

    seed: Any
    """uint32 []."""
    rates: Any
    """Chance that a branch of each block is left out, float32 [layers]."""


def scales(drop: Drop, step: jax.Array, batch_size: int) -> jax.Array:
    """What every branch is taken times: 0 or 1 / (1 - rate), float32 [batch_size, layers, BRANCHES].

    Args:
        drop: of the run.
        step: optimizer steps done, int32 [].
        batch_size: examples of the global batch.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(drop.seed), _STREAM), step)
    stays = 1 - drop.rates[:, None]
    shape = (batch_size, drop.rates.shape[0], BRANCHES)
    return jnp.where(jax.random.uniform(key, shape) < stays, 1 / stays, 0.0)
