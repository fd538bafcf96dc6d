"""The MLP branch: one hidden layer, plain or gated (SwiGLU). B batch, T positions, D width, F hidden."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo import partition
from mupax.zoo.layers.linear import biased, project
from mupax.zoo.param import Init
from mupax.zoo.transformer import TransformerConfig


class MLP(nnx.Module):
    """W_out act(W_in x), or W_out (silu(W_gate x) * W_up x)."""

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.activation = config.activation
        self.fused = config.compute.projections == "fused"
        self.up, self.gate, self.down = init.param("up"), init.maybe("gate"), init.param("down")
        self.up_bias, self.gate_bias = init.maybe("up_bias"), init.maybe("gate_bias")
        self.down_bias = init.maybe("down_bias")

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF, g_BTF = self._projected(x_BTD)
        if g_BTF is not None:
            h_BTF = jax.nn.silu(g_BTF) * h_BTF
        else:
            exact = self.activation == "gelu_exact"
            h_BTF = jax.nn.relu(h_BTF) if self.activation == "relu" else jax.nn.gelu(h_BTF, approximate=not exact)
        h_BTF = partition.constrain(h_BTF, "batch", "sequence", "mlp")
        return biased(project(h_BTF, self.down[...]), self.down_bias)

    def _projected(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Up and, where there is one, gate, both [B, T, F]."""
        if self.gate is None:
            return biased(project(x_BTD, self.up[...]), self.up_bias), None
        if self.fused:
            # Side by side on an axis of their own, so that F stays split as it is.
            both_D2F = jnp.stack([self.up[...], self.gate[...]], axis=1)
            up_BTF, gate_BTF = jnp.moveaxis(project(x_BTD, both_D2F), -2, 0)
        else:
            up_BTF, gate_BTF = project(x_BTD, self.up[...]), project(x_BTD, self.gate[...])
        return biased(up_BTF, self.up_bias), biased(gate_BTF, self.gate_bias)
