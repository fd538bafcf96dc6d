"""The last linear map, kept apart from its product so that a loss may compute logits in parts. D width, V vocabulary or classes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mupax.zoo.layers.linear import project


class Reading(NamedTuple):
    """What logits are made of: scale * features @ weight + bias, in float32."""

    features: jax.Array
    """[..., D], in the type that products are computed in."""
    weight: jax.Array
    """[D, V]."""
    scale: jax.Array | None = None
    """[]; that of a readout through the embedding."""
    bias: jax.Array | None = None
    """[V]."""

    def logits(self) -> jax.Array:
        """All of them, float32 [..., V]."""
        logits = project(self.features, self.weight, out_dtype=jnp.float32)
        if self.scale is not None:
            logits = self.scale * logits
        return logits if self.bias is None else logits + self.bias
