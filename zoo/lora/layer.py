"""Low-rank adapters: their layer, and matrices with adapters merged into them.

I inputs, O outputs, R rank. I and O can each be several dimensions.
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
    """Low-rank adapter scale * x A B (LoRA, Hu et al. 2021) of one matrix.

    Args:
        scale: Factor on the product, alpha / rank.
        init: Scope of the parameters `a` [I, R] and `b` [R, O].
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, scale: float, init: Init) -> None:
        self.scale = scale
        self.a = init.param("a")
        self.b = init.param("b")

    def __call__(self, x: jax.Array, inputs: int = 1) -> jax.Array:
        """Return the adapter's output, which is added to that of its matrix, [..., O].

        Args:
            x: Inputs of the matrix, [..., I].
            inputs: Number of trailing dimensions of x that make up I.
        """
        low_rank = project(x, self.a[...], inputs=inputs, layout=self.layout)
        return self.scale * project(low_rank, self.b[...], layout=self.layout)


def merged(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return the parameters of the network without adapters that computes the same function.

    A matrix W with an adapter becomes W + scale * A B in float32. Other parameters do not change.

    Args:
        params: Parameters by name, as NumPy arrays that already contain their multipliers. Matrices
            and adapters have a leading axis of layers.
        scale: Factor on the product, alpha / rank (`LoraConfig.scale`).
    """
    plain = {}
    for name, w in params.items():
        if not name.endswith(("_lora.a", "_lora.b")):
            plain[name] = w

    for name, w in plain.items():
        if f"{name}_lora.a" not in params:
            continue
        # Sums and products are in float64, so that only the result is rounded.
        a_LIR = np.asarray(params[f"{name}_lora.a"], np.float64)
        b_LRO = np.asarray(params[f"{name}_lora.b"], np.float64)
        products = [
            np.tensordot(a_IR, b_RO, axes=1) for a_IR, b_RO in zip(a_LIR, b_LRO, strict=True)
        ]
        merged_LIO = np.asarray(w, np.float64) + scale * np.stack(products)
        plain[name] = merged_LIO.astype(np.float32)
    return plain
