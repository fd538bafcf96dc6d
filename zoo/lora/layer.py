"""What adapters compute beside the product of their matrix, and the one matrix that both are.

I inputs, O outputs, R rank, each of one dimension or several but the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.layers.linear import project
from mupax.zoo.partition import ONE_DEVICE, Layout


class Lora(nnx.Module):
    """scale * x A B."""

    layout: Layout = ONE_DEVICE

    def __init__(self, scale: float, init: Init) -> None:
        self.scale = scale
        self.a, self.b = init.param("a"), init.param("b")

    def __call__(self, x: jax.Array, inputs: int = 1) -> jax.Array:
        """[..., O].

        Args:
            x: [..., I].
            inputs: dimensions that I is.
        """
        low = project(x, self.a[...], inputs=inputs, layout=self.layout)
        return self.scale * project(low, self.b[...], layout=self.layout)


def merged(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """W + scale * A B in place of each W with an adapter, of the plain network, float32; the others as they are.

    Args:
        params: by name, of the host.
        scale: of the config.
    """
    plain = {name: w for name, w in params.items() if not name.endswith(("_lora.a", "_lora.b"))}
    for name in (name for name in plain if f"{name}_lora.a" in params):
        a, b = (np.asarray(params[f"{name}_lora.{which}"], np.float64) for which in "ab")
        product = np.stack([np.tensordot(*of, axes=1) for of in zip(a, b, strict=True)])
        plain[name] = (np.asarray(plain[name], np.float64) + scale * product).astype(np.float32)
    return plain
