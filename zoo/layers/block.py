"""The residual stack: one pre-norm block, stored stacked over depth, run as a scan or unrolled.

Storage does not depend on how the stack runs, so checkpoints serve both. B batch, T positions, D width, F hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo import partition
from mupax.zoo.families import ComputeConfig
from mupax.zoo.layers import kernels
from mupax.zoo.layers.attention import Attention
from mupax.zoo.layers.linear import Norm, biased, project
from mupax.zoo.param import Init
from mupax.zoo.transformer import TransformerConfig

if TYPE_CHECKING:
    from mupax.zoo.layers.cache import Cache

BLOCK_INPUT = "block_input"

_policies = jax.checkpoint_policies
REMAT = {
    "none": None,
    "dots": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(kernels.SAVED)
    ),
    "block": _policies.nothing_saveable,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What the backward pass may keep of a block; everything else it recomputes.

none: everything. dots: matrix products, and what a flash kernel's gradient needs. block: nothing but its input, which lies in
the host's memory with offload.
"""


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
        elif self.activation == "relu":
            h_BTF = jax.nn.relu(h_BTF)
        else:
            h_BTF = jax.nn.gelu(h_BTF, approximate=self.activation != "gelu_exact")
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


class Block(nnx.Module):
    """h <- skip*h + branch*attention(norm(h)), then the same with the MLP. Branch scales are applied here only."""

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.attention_norm = Norm(config.norm, init.scope("attention_norm"), config.norm_eps)
        self.attention = Attention(config, init.scope("attention"))
        self.mlp_norm = Norm(config.norm, init.scope("mlp_norm"), config.norm_eps)
        self.mlp = MLP(config, init.scope("mlp"))
        self.skip, self.branch = init.factor("skip"), init.factor("branch")

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        return self._added(h_BTD, self.attention(self.attention_norm(h_BTD)))

    def cached(self, h_BTD: jax.Array, cache: Cache, layer: jax.Array | int, *, fresh: bool) -> tuple[jax.Array, Cache]:
        """The same for the positions after those in the cache (see `Attention.cached`), and the cache with them."""
        y_BTD, cache = self.attention.cached(self.attention_norm(h_BTD), cache, layer, fresh=fresh)
        return self._added(h_BTD, y_BTD), cache

    def _added(self, h_BTD: jax.Array, attention_BTD: jax.Array) -> jax.Array:
        skip, branch = self.skip[...].astype(h_BTD.dtype), self.branch[...].astype(h_BTD.dtype)
        h_BTD = skip[0] * h_BTD + branch[0] * attention_BTD
        h_BTD = skip[1] * h_BTD + branch[1] * self.mlp(self.mlp_norm(h_BTD))
        return partition.constrain(h_BTD, "batch", "sequence", None)


UNROLLED_DEPTH = 16
"""Deepest stack that auto unrolls on CPU: compile time grows with every block."""


def runs_as_scan(compute: ComputeConfig, depth: int) -> bool:
    """Whether the stack is a loop.

    auto: not on CPU, where a loop copies every layer's weights and gradients out of and into the stack, a tenth to a
    quarter of a step (`python -m scripts.bench.layers`); elsewhere it is one, for the compile time of deep models.
    """
    if compute.layers == "auto":
        return partition.current().platform != "cpu" or depth > UNROLLED_DEPTH
    return compute.layers == "scan"


def residual_stack(block: nnx.Module, h_BTD: jax.Array, depth: int, compute: ComputeConfig) -> jax.Array:
    """Apply `depth` blocks, given as one module whose parameters are stacked along a leading "layers" axis."""
    graph, stacked = nnx.split(block)
    scan = runs_as_scan(compute, depth)

    def layer(h_BTD: jax.Array, state: nnx.State) -> tuple[jax.Array, None]:
        return nnx.merge(graph, state)(checkpoint_name(h_BTD, BLOCK_INPUT)), None

    if (policy := REMAT[compute.remat]) is not None:
        # Inside a scan the loop already keeps XLA from merging the recomputation with the forward pass.
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan)
    if scan:
        return jax.lax.scan(layer, h_BTD, stacked)[0]
    for index in range(depth):
        h_BTD, _ = layer(h_BTD, jax.tree.map(lambda array, i=index: array[i], stacked))
    return h_BTD
