"""Residual stack of the transformers: pre-norm blocks of attention and an MLP or experts.

The blocks' parameters are stacked over depth and applied by a scan or one after another. Both read
the same checkpoints.

B batch, T query and S key positions, D width, F hidden size, H heads, K key heads, G query heads
per key head (in fused projections with a key and a value head), N head dimension, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo.definition import Init
from mupax.zoo.families import AttentionName, ComputeConfig
from mupax.zoo.layers import kernels
from mupax.zoo.layers.kernels import largest_logits
from mupax.zoo.layers.linear import (
    GATES,
    SAVED,
    Norm,
    adapted,
    biased,
    product_kind,
    project,
    rotary,
)
from mupax.zoo.partition import ONE_DEVICE, Layout
from mupax.zoo.transformer import TransformerConfig

if TYPE_CHECKING:
    from mupax.zoo.experts.layer import Experts
    from mupax.zoo.experts.routing import Routing
    from mupax.zoo.layers.cache import Cache

BLOCK_INPUT = "block_input"
"""Checkpoint name of the residual stream before a block."""

UNROLLED_DEPTH = 16
"""Most blocks that `compute.layers` auto unrolls, on CPU. Compile time grows with every block."""

WIDE = 4096
"""Model width from which a gated MLP's hidden layer is stored in memory on TPU (`_materialized`).

Below this width, the compiler may compute the gate again inside every product that reads it. At
4096 (lm-8b, v5e:16x16) storing saves 4.6 of 53.3 M cycles of a layer's backward pass. At 2048
(1.2 B, v5e:4x4) it would cost 3.7 of 36.8 M cycles of both passes.
"""

CUDNN = "dot_product_attention_fwd_wrapper"
"""Name of the JAX primitive of cuDNN's forward kernel."""

_policies = jax.checkpoint_policies


class BlockStatistics(NamedTuple):
    """Measurements of a block or, with a leading axis of layers, of all blocks.

    `run_stack` reduces `routing` over the blocks.
    """

    routing: Routing | None = None
    """Routing statistics. `None` without experts."""
    attention_logits: dict[str, jax.Array] | None = None
    """Largest attention logit of each head by attention, float32 [H]. `None` if not measured.

    The keys are the names of a block's attentions, "attention" and "cross".
    """


NO_STATISTICS = BlockStatistics()
"""Statistics of blocks that measure nothing and have no experts."""


class Attention(nnx.Module):
    """Multi-head attention softmax(logit_scale * q k) v, projected to the residual stream.

    The preset's logit scale is applied here and nowhere else.

    Attributes:
        attention_specs: Mask and soft cap of the first layers, up to the one after which the
            pattern repeats (`TransformerConfig.attention_specs`). `at` selects one of them.
        block: Positions on a side of a splash block. `None` is the chip's own.
        fused: Whether one product computes queries, keys and values.
        kind: Number type of the products, `product_dtype` of the compute config.
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.attention_specs = config.attention_specs
        # Base and scaling of the rotary frequencies for each block of a period (`full_every`).
        self.rotary_settings = tuple(config.rotary_of(spec) for spec in config.attention_specs)
        self.rotary_size = config.rotary_size
        self.at(0)
        self.implementation: AttentionName = config.compute.attention
        self.block = config.compute.attention_block
        self.fused = config.compute.projections == "fused"
        self.kind = product_kind(config.compute)

        # Parameters draw random keys in the order in which they are made: reordering these lines
        # changes the initial values of a model built with `rngs`.
        self.query = init.param("query")
        self.key = init.param("key")
        self.value = init.param("value")
        self.out = init.param("out")
        self.query_lora, self.key_lora, self.value_lora, self.out_lora = config.lora.modules(
            init, "query", "key", "value", "out"
        )
        self.query_bias = init.maybe("query_bias")
        self.key_bias = init.maybe("key_bias")
        self.value_bias = init.maybe("value_bias")
        self.out_bias = init.maybe("out_bias")
        if config.qk_norm:
            kind = config.qk_norm_kind
            self.query_norm = Norm(kind, init.scope("query_norm"), config.norm_eps)
            self.key_norm = Norm(kind, init.scope("key_norm"), config.norm_eps)
        else:
            self.query_norm = None
            self.key_norm = None
        self.logit_scale = init.factor("logit_scale")

    def at(self, place: int) -> None:
        """Set the module's mask, soft cap and rotary positions to those of one layer, in place.

        Args:
            place: Index into `attention_specs`.
        """
        spec = self.attention_specs[place]
        self.causal = spec.causal
        self.window = spec.window
        self.cap = spec.cap
        self.rope_theta, self.rope_scaling = self.rotary_settings[place]

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        q_BTHN, k_BSKN, v_BSKN = self.heads(x_BTD)
        return self._attended(q_BTHN, k_BSKN, v_BSKN, segments_BT)

    def with_logits(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the attention output [B, T, D] and the largest logit of each head, float32 [H].

        The largest logit is the one before the soft cap.

        Args:
            x_BTD: Normed residual stream, [B, T, D].
            segments_BT: Document of each position, int32. Default: one document.
        """
        q_BTHN, k_BSKN, v_BSKN = self.heads(x_BTD)
        y_BTD = self._attended(q_BTHN, k_BSKN, v_BSKN, segments_BT)
        return y_BTD, self._largest_logits(q_BTHN, k_BSKN, segments_BT=segments_BT)

    def _largest_logits(
        self,
        q_BTHN: jax.Array,
        k_BSKN: jax.Array,
        *,
        mask_BS: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Return the largest logit of each head over all pairs that attention sees, float32 [H].

        The soft cap is not applied.

        Args:
            q_BTHN: Queries without the logit scale, as `heads` returns them.
            k_BSKN: Keys, as `heads` returns them.
            mask_BS: bool, `True` at keys that queries may see. Default: all.
            segments_BT: Document of each position, int32. Default: one document.
        """
        return largest_logits(
            self._scaled(q_BTHN),
            k_BSKN,
            causal=self.causal,
            window=self.window,
            mask_BS=mask_BS,
            segments_BT=segments_BT,
            layout=self.layout,
        )

    def cached(
        self, x_BTD: jax.Array, cache: Cache, layer: jax.Array | int, *, fresh: bool
    ) -> tuple[jax.Array, Cache]:
        """Return the attention output [B, T, D] of T new positions, and the updated cache.

        The new positions attend to the cached ones and to one another. The returned cache also
        holds the keys and values of the new positions. Its `length` is not increased yet, because
        other layers still write to the same positions.

        Args:
            x_BTD: Normed residual stream at the T new positions, [B, T, D].
            cache: Cache of all layers, to which this layer writes at index `layer`. It must have T
                free positions.
            layer: Index of this layer, from 0.
            fresh: `True` if the cache is empty. The new positions then see only one another.
        """
        start = None if fresh else cache.length
        q_BTHN, k_BTKN, v_BTKN = self.heads(x_BTD, start)
        cache = cache.put(layer, k_BTKN, v_BTKN)
        # An empty cache holds no earlier positions, so ordinary attention among the new ones is
        # enough.
        if fresh:
            return self._attended(q_BTHN, k_BTKN, v_BTKN), cache
        y_BTHN = cache.attend(layer, self._scaled(q_BTHN), window=self.window, cap=self.cap)
        return self._projected_out(y_BTHN), cache

    def heads(
        self, x_BTD: jax.Array, start: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [B, T, H, N] without the logit scale, and keys and values [B, S, K, N].

        Norms and rotary positions are applied to queries and keys, if the model has them.

        Args:
            x_BTD: Normed residual stream, [B, T, D].
            start: Position of the first entry of x along T, int32 [], or int32 [B] with one for
                each sequence. Default: positions of the layout, which begin at 0.
        """
        q_BTHN, k_BSKN, v_BSKN = self._projected(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            # The norm comes before the rotation. Its gain differs by entry, so the two do not
            # commute.
            q_BTHN = self.query_norm(q_BTHN)
            k_BSKN = self.key_norm(k_BSKN)
        if self.rope_theta is not None:
            q_BTHN = self._rotated(q_BTHN, start)
            k_BSKN = self._rotated(k_BSKN, start)
        # `kernels.attend` constrains keys and values. Only a ring keeps their positions split.
        q_BTHN = self.layout.constrain(q_BTHN, ("batch", "sequence", "heads", None))
        return q_BTHN, k_BSKN, v_BSKN

    def _rotated(self, x_BTHN: jax.Array, start: jax.Array | None) -> jax.Array:
        """Return queries or keys with rotary positions applied.

        Args:
            start: Position of the first entry of x, as for `heads`.
        """
        assert self.rope_theta is not None
        return rotary(
            x_BTHN, self.rope_theta, start, self.rope_scaling, self.rotary_size, layout=self.layout
        )

    def _projected(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return x multiplied by the query, key and value matrices, with adapters and biases."""
        query_DHN = self.query[...]
        key_DKN = self.key[...]
        value_DKN = self.value[...]
        if self.fused:
            q_BTHN, k_BSKN, v_BSKN = self._fused_projection(x_BTD, query_DHN, key_DKN, value_DKN)
        else:
            q_BTHN = project(x_BTD, query_DHN, kind=self.kind, layout=self.layout)
            k_BSKN = project(x_BTD, key_DKN, kind=self.kind, layout=self.layout)
            v_BSKN = project(x_BTD, value_DKN, kind=self.kind, layout=self.layout)

        q_BTHN = adapted(q_BTHN, x_BTD, self.query_lora)
        k_BSKN = adapted(k_BSKN, x_BTD, self.key_lora)
        v_BSKN = adapted(v_BSKN, x_BTD, self.value_lora)
        q_BTHN = biased(q_BTHN, self.query_bias)
        k_BSKN = biased(k_BSKN, self.key_bias)
        v_BSKN = biased(v_BSKN, self.value_bias)
        return q_BTHN, k_BSKN, v_BSKN

    def _fused_projection(
        self, x_BTD: jax.Array, query_DHN: jax.Array, key_DKN: jax.Array, value_DKN: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values by one matrix product, before adapters and biases."""
        width, kv_heads, size = key_DKN.shape
        # Every key head lies next to its queries, so that devices split the fused heads in the same
        # way as the separate ones.
        query_DKGN = query_DHN.reshape(width, kv_heads, -1, size)
        key_DK1N = key_DKN[:, :, None]
        value_DK1N = value_DKN[:, :, None]
        fused_DKGN = jnp.concatenate([query_DKGN, key_DK1N, value_DK1N], axis=2)

        y_BTKGN = project(x_BTD, fused_DKGN, kind=self.kind, layout=self.layout)
        q_BTKGN = y_BTKGN[..., :-2, :]
        q_BTHN = q_BTKGN.reshape(*x_BTD.shape[:-1], *query_DHN.shape[1:])
        k_BSKN = y_BTKGN[..., -2, :]
        v_BSKN = y_BTKGN[..., -1, :]
        return q_BTHN, k_BSKN, v_BSKN

    def _attended(
        self,
        q_BTHN: jax.Array,
        k_BSKN: jax.Array,
        v_BSKN: jax.Array,
        segments_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Return the attention output, projected to the residual stream's width, [B, T, D].

        The arguments are the results of `heads`. The logit scale is applied here.
        """
        y_BTHN = kernels.attend(
            self._scaled(q_BTHN),
            k_BSKN,
            v_BSKN,
            causal=self.causal,
            window=self.window,
            cap=self.cap,
            implementation=self.implementation,
            block=self.block,
            segments_BT=segments_BT,
            layout=self.layout,
        )
        return self._projected_out(y_BTHN)

    def _scaled(self, q_BTHN: jax.Array) -> jax.Array:
        """Return queries multiplied by the logit scale."""
        return q_BTHN * self.logit_scale[...].astype(q_BTHN.dtype)

    def _projected_out(self, y_BTHN: jax.Array) -> jax.Array:
        """Return the heads' outputs times the output matrix, with adapter and bias, [B, T, D]."""
        y_BTHN = self.layout.constrain(y_BTHN, ("batch", "sequence", "heads", None))
        y_BTD = project(y_BTHN, self.out[...], inputs=2, kind=self.kind, layout=self.layout)
        y_BTD = adapted(y_BTD, y_BTHN, self.out_lora, inputs=2)
        return biased(y_BTD, self.out_bias)


class MLP(nnx.Module):
    """Two-layer MLP W_out act(W_in x), or the gated W_out (act(W_gate x) * W_up x).

    Attributes:
        fused: Whether one product computes both W_gate x and W_up x.
        kind: Number type of the products, `product_dtype` of the compute config.
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.activation = config.activation
        self.fused = config.compute.projections == "fused"
        self.kind = product_kind(config.compute)
        self.up = init.param("up")
        self.gate = init.maybe("gate")
        self.down = init.param("down")
        self.up_lora, self.gate_lora, self.down_lora = config.lora.modules(
            init, "up", "gate", "down"
        )
        self.up_bias = init.maybe("up_bias")
        self.gate_bias = init.maybe("gate_bias")
        self.down_bias = init.maybe("down_bias")

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        up_BTF, gate_BTF = self._up_and_gate(x_BTD)
        if gate_BTF is not None:
            width = x_BTD.shape[-1]
            platform = self.layout.platform
            up_BTF, gate_BTF = _materialized((up_BTF, gate_BTF), width, platform)
            h_BTF = GATES[self.activation](gate_BTF) * up_BTF
            h_BTF = _materialized(h_BTF, width, platform)
        elif self.activation == "relu":
            h_BTF = jax.nn.relu(up_BTF)
        else:
            h_BTF = jax.nn.gelu(up_BTF, approximate=self.activation != "gelu_exact")

        h_BTF = self.layout.constrain(h_BTF, ("batch", "sequence", "mlp"))
        y_BTD = project(h_BTF, self.down[...], kind=self.kind, layout=self.layout)
        y_BTD = adapted(y_BTD, h_BTF, self.down_lora)
        return biased(y_BTD, self.down_bias)

    def _up_and_gate(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return W_up x and W_gate x, [B, T, F], or W_up x and `None` for an MLP without a gate.

        Adapters and biases are included.
        """
        if self.gate is None:
            up_BTF = project(x_BTD, self.up[...], kind=self.kind, layout=self.layout)
            up_BTF = adapted(up_BTF, x_BTD, self.up_lora)
            return biased(up_BTF, self.up_bias), None

        if self.fused:
            # The two matrices lie along an axis of their own, so that devices split F as before.
            fused_D2F = jnp.stack([self.up[...], self.gate[...]], axis=1)
            y_BT2F = project(x_BTD, fused_D2F, kind=self.kind, layout=self.layout)
            up_BTF, gate_BTF = jnp.moveaxis(y_BT2F, -2, 0)
        else:
            up_BTF = project(x_BTD, self.up[...], kind=self.kind, layout=self.layout)
            gate_BTF = project(x_BTD, self.gate[...], kind=self.kind, layout=self.layout)
        up_BTF = adapted(up_BTF, x_BTD, self.up_lora)
        gate_BTF = adapted(gate_BTF, x_BTD, self.gate_lora)
        return biased(up_BTF, self.up_bias), biased(gate_BTF, self.gate_bias)


def _materialized(x: Any, width: int, platform: str) -> Any:
    """Return x behind a barrier that makes the TPU compiler store it in memory.

    Otherwise the compiler may compute x again inside every product that reads it. On other
    platforms, and for models whose width is below `WIDE`, x is returned unchanged.

    Args:
        x: One array, or a pytree of several arrays.
        width: Width D of the model, for the comparison with `WIDE`.
    """
    if platform != "tpu" or width < WIDE:
        return x
    # The compiler would otherwise compute the gate again inside of every product that reads it.
    return jax.lax.optimization_barrier(x)


def _experts(config: TransformerConfig, init: Init) -> Experts:
    """Build the layer of experts."""
    # Imported only here, because models without experts do not need the modules.
    from mupax.zoo.experts.layer import Experts

    return Experts(config, init)


class Block(nnx.Module):
    """Residual block h <- skip * h + branch * gain * norm(f(norm(h))), with f attention, then MLP.

    The outer norm and the gain exist only where the config declares them. Factors and gains of
    branches are applied here and nowhere else.
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        kind = config.norm
        eps = config.norm_eps
        activation = config.branch_activation
        self.attention_norm = Norm(kind, init.scope("attention_norm"), eps, activation)
        self.attention = Attention(config, init.scope("attention"))
        self.mlp_norm = Norm(kind, init.scope("mlp_norm"), eps, activation)
        # A model with experts has an MLP only for its shared experts.
        self.mlp = MLP(config, init.scope("mlp")) if config.dense_dim else None
        self.experts = _experts(config, init.scope("experts")) if config.experts else None
        self.attention_gain = init.maybe("attention_gain")
        self.mlp_gain = init.maybe("mlp_gain")
        self.post_norm = Norm(kind, init.scope("post_norm"), eps) if config.post_norms else None
        self.skip = init.factor("skip")
        self.branch = init.factor("branch")
        self.parallel = config.parallel_branches

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        h_BTD, _ = self.measured(h_BTD)
        return h_BTD

    def measured(
        self,
        h_BTD: jax.Array,
        segments_BT: jax.Array | None = None,
        scale_B2: jax.Array | None = None,
        *,
        measure_logits: bool = False,
    ) -> tuple[jax.Array, BlockStatistics]:
        """Return the residual stream after the block, and the block's statistics.

        Args:
            h_BTD: Residual stream, [B, T, D].
            segments_BT: Document of each position, int32. Default: one document.
            scale_B2: Factor on the attention and MLP branch of every example, from drop path.
                Default: 1.
            measure_logits: `True` fills the statistics' `attention_logits`.
        """
        x_BTD = self.attention_norm(h_BTD)
        attention_logits = None
        if measure_logits:
            attention_BTD, logits_H = self.attention.with_logits(x_BTD, segments_BT)
            attention_logits = {"attention": logits_H}
        else:
            attention_BTD = self.attention(x_BTD, segments_BT)
        h_BTD, routing = self._add_branches(h_BTD, attention_BTD, scale_B2=scale_B2)
        return h_BTD, BlockStatistics(routing, attention_logits)

    @property
    def period(self) -> int:
        """Number of layers after which masks and rotary positions repeat."""
        return len(self.attention.attention_specs)

    def at(self, layer: int) -> Block:
        """Set the block to a layer's mask and rotary positions, in place, and return the block.

        Args:
            layer: Index of the layer or its place within the period, from 0.
        """
        self.attention.at(layer % self.period)
        return self

    def cached(
        self, h_BTD: jax.Array, cache: Cache, layer: jax.Array | int, *, fresh: bool
    ) -> tuple[jax.Array, Cache]:
        """Apply the block to T new positions. Return their residual stream and the new cache.

        The positions follow those in the cache. The returned cache holds the keys and values of the
        new positions, but its `length` is not increased yet. Experts drop no tokens here, whatever
        their capacity, because a text that is written token by token has no complete example.

        Args:
            h_BTD: Residual stream at the T new positions, [B, T, D].
            cache: Cache of all layers, to which this layer writes at index `layer`. It must have T
                free positions.
            layer: Index of this layer, from 0.
            fresh: `True` if the cache is empty. The new positions then see only one another.
        """
        x_BTD = self.attention_norm(h_BTD)
        attention_BTD, cache = self.attention.cached(x_BTD, cache, layer, fresh=fresh)
        h_BTD, _ = self._add_branches(h_BTD, attention_BTD, dropless=True)
        return h_BTD, cache

    def add_branch(
        self, h_BTD: jax.Array, place: int, y_BTD: jax.Array, scale_B2: jax.Array | None = None
    ) -> jax.Array:
        """Return skip * h + branch * scale * gain * norm(y), the residual stream after a branch.

        Norm and gain are left out where the model has none.

        Args:
            h_BTD: Residual stream, [B, T, D].
            place: 0 for the attention branch, 1 for the MLP branch.
            y_BTD: Output of the branch, [B, T, D].
            scale_B2: Factor on the two branches of every example, from drop path. Default: 1.
        """
        skip = self.skip[...].astype(h_BTD.dtype)
        branch = self.branch[...].astype(h_BTD.dtype)
        gain = self.mlp_gain
        if place == 0:
            gain = self.attention_gain
        if self.post_norm is not None:
            y_BTD = self.post_norm(y_BTD)
        if gain is not None:
            y_BTD = y_BTD * gain[...].astype(y_BTD.dtype)
        if scale_B2 is not None:
            scale_B11 = scale_B2[:, place, None, None]
            y_BTD = y_BTD * scale_B11.astype(y_BTD.dtype)
        return skip[place] * h_BTD + branch[place] * y_BTD

    def _add_branches(
        self,
        h_BTD: jax.Array,
        attention_BTD: jax.Array,
        *,
        dropless: bool = False,
        scale_B2: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """Add the attention branch, then compute and add the branch of MLP and experts.

        Return the residual stream after both, and the routing statistics (`None` without experts).

        Args:
            dropless: Ignore the capacity of experts, so that no token is dropped.
            scale_B2: Factor on the two branches of every example. Default: 1.
        """
        input_BTD = h_BTD
        h_BTD = self.add_branch(h_BTD, 0, attention_BTD, scale_B2)
        # Parallel branches both read the stream before the block.
        x_BTD = self.mlp_norm(input_BTD if self.parallel else h_BTD)
        routing = None
        if self.experts is None:
            assert self.mlp is not None
            y_BTD = self.mlp(x_BTD)
        else:
            y_BTD, routing = self.experts(x_BTD, dropless=dropless)
            if self.mlp is not None:
                # The MLP holds the shared experts.
                y_BTD = self.mlp(x_BTD) + y_BTD
        h_BTD = self.add_branch(h_BTD, 1, y_BTD, scale_B2)
        return self.layout.constrain(h_BTD, ("batch", "sequence", None)), routing


def _is_cudnn_forward(primitive: Any, *_: Any, **__: Any) -> bool:
    # JAX gives the outputs of cuDNN's kernel no checkpoint name, so its primitive is recognized.
    return primitive.name == CUDNN


_save_attention = _policies.save_from_both_policies(
    _policies.save_only_these_names(SAVED), _is_cudnn_forward
)
REMAT = {
    "none": None,
    "dots": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _save_attention
    ),
    "attention": _save_attention,
    "block": _policies.nothing_saveable,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Checkpoint policy by `compute.remat`: what the backward pass may keep of a block.

Everything else is recomputed. The input of a block is always kept.

* none: Everything. Nothing is recomputed.
* dots: Matrix products and what "attention" keeps.
* attention: Output and softmax sums of the flash kernel, so that it runs forward only once.
* block: Only the block's input.
* offload: Only the block's input, moved to the host's memory.
"""


def runs_as_scan(compute: ComputeConfig, depth: int, *, layout: Layout = ONE_DEVICE) -> bool:
    """Return whether the stack is compiled as a loop over layers instead of being unrolled.

    Args:
        compute: Compute config, whose `layers` is auto, scan or unrolled.
        depth: Number of blocks. With auto, a CPU unrolls up to `UNROLLED_DEPTH`, and GPUs and TPUs
            always loop.
        layout: Layout on the devices that the stack is compiled for.
    """
    if compute.layers == "auto":
        # A loop keeps the compile time of deep models short. On CPU it copies every layer's weights
        # out of the stack and gradients into it, a tenth to a quarter of a step
        # (`python -m scripts.bench.step.layers`).
        return layout.platform != "cpu" or depth > UNROLLED_DEPTH
    return compute.layers == "scan"


def over_layers(
    layer: Callable[[Any, Any, int], tuple[Any, Any]],
    first: Any,
    stacked: Any,
    depth: int,
    period: int = 1,
) -> tuple[Any, Any]:
    """Apply a function to all layers in a loop. Return the last carry and all outputs, stacked.

    The body of the loop (`jax.lax.scan`) is `period` consecutive layers, which may differ in what
    they compute, for example in their attention window. Layers that do not fill a period follow
    after the loop.

    Args:
        layer: Function (carry, slice of `stacked`, index of the layer modulo `period`) -> (carry,
            output).
        first: Carry into the first layer, such as the residual stream [B, T, D].
        stacked: Pytree of arrays with a leading axis of layers.
        depth: Number of layers, the size of the leading axis.
        period: Number of layers after which the computation repeats.
    """
    if period == 1:

        def single(carry: Any, layer_slice: Any) -> tuple[Any, Any]:
            return layer(carry, layer_slice, 0)

        return jax.lax.scan(single, first, stacked)

    looped_depth = depth // period * period

    def consecutive(carry: Any, group: Any, count: int) -> tuple[Any, Any]:
        outputs = []
        for place in range(count):
            layer_slice = jax.tree.map(lambda array, index=place: array[index], group)
            carry, output = layer(carry, layer_slice, place)
            outputs.append(output)
        return carry, jax.tree.map(lambda *arrays: jnp.stack(arrays), *outputs)

    def period_body(carry: Any, group: Any) -> tuple[Any, Any]:
        return consecutive(carry, group, period)

    # Layers within a period may differ, so the loop is over groups of `period` layers.
    def grouped(array: jax.Array) -> jax.Array:
        return array[:looped_depth].reshape(-1, period, *array.shape[1:])

    def ungrouped(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])

    carry = first
    parts = []
    if looped_depth > 0:
        carry, outputs = jax.lax.scan(period_body, carry, jax.tree.map(grouped, stacked))
        parts.append(jax.tree.map(ungrouped, outputs))
    if looped_depth < depth:
        remaining = jax.tree.map(lambda array: array[looped_depth:], stacked)
        carry, outputs = consecutive(carry, remaining, depth - looped_depth)
        parts.append(outputs)
    return carry, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def residual_stack(
    block: nnx.Module,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    *context: Any,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return the residual stream after `depth` blocks, [B, T, D].

    Args:
        block: One module, whose parameters are stacked along a leading axis "layers".
        h_BTD: Residual stream, which the first block reads.
        depth: Number of blocks, the size of the axis "layers".
        compute: Compute config. `layers` selects scan or unrolled, `remat` the checkpoint policy.
        *context: Arguments that every block takes after the stream.
        layout: Layout of arrays on devices. A field `layout` of the block is not changed.
    """

    def call(block: Any, h_BTD: jax.Array) -> tuple[jax.Array, BlockStatistics]:
        return block(h_BTD, *context), NO_STATISTICS

    h_BTD, _ = _stack(block, call, h_BTD, (), depth=depth, compute=compute, layout=layout)
    return h_BTD


def measured_stack(
    block: nnx.Module,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    *context: Any,
    layout: Layout = ONE_DEVICE,
) -> tuple[jax.Array, BlockStatistics]:
    """Return the residual stream after `depth` blocks, and statistics with a leading layer axis.

    Args:
        block: One module with a method `measured` (stream, *context) -> (stream, statistics).
        h_BTD, depth, compute, layout: Same as in `residual_stack`.
        *context: Arguments that every block takes after the stream.
    """

    def call(block: Any, h_BTD: jax.Array) -> tuple[jax.Array, BlockStatistics]:
        return block.measured(h_BTD, *context)

    return _stack(block, call, h_BTD, (), depth=depth, compute=compute, layout=layout)


def run_stack(
    block: Block,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    *context: Any,
    scale_BL2: jax.Array | None = None,
    measure_logits: bool = False,
    layout: Layout = ONE_DEVICE,
) -> tuple[jax.Array, BlockStatistics]:
    """Apply all blocks. Return the residual stream and the statistics.

    Routing statistics are averaged over blocks, except counts, which are summed. Attention logits
    have a leading axis of layers.

    Args:
        block, h_BTD, depth, compute, layout: Same as in `residual_stack`.
        *context: Arguments that `Block.measured` takes after the stream.
        scale_BL2: Factor on the two branches of every block and example. Default: 1.
        measure_logits: `True` fills the statistics' `attention_logits`.
    """
    layer_inputs = ()
    if scale_BL2 is not None:
        scale_LB2 = jnp.swapaxes(scale_BL2, 0, 1)
        layer_inputs = (scale_LB2,)

    def call(
        block: Block, h_BTD: jax.Array, scale_B2: jax.Array | None = None
    ) -> tuple[jax.Array, BlockStatistics]:
        return block.measured(h_BTD, *context, scale_B2=scale_B2, measure_logits=measure_logits)

    h_BTD, statistics = _stack(
        block,
        call,
        h_BTD,
        layer_inputs,
        depth=depth,
        compute=compute,
        layout=layout,
        period=block.period,
    )
    routing = statistics.routing
    if routing is not None:
        routing = routing.over_blocks()
    return h_BTD, statistics._replace(routing=routing)


def named_logits(scope: str, statistics: BlockStatistics) -> dict[str, jax.Array] | None:
    """Return a stack's largest attention logits by full name, such as "block.attention".

    The result is `None` if they were not measured.

    Args:
        scope: Name of the stack's block in the model, such as "encoder.block".
    """
    if statistics.attention_logits is None:
        return None
    return {f"{scope}.{name}": largest for name, largest in statistics.attention_logits.items()}


def _stack(
    block: nnx.Module,
    call: Callable[..., tuple[jax.Array, BlockStatistics]],
    h_BTD: jax.Array,
    layer_inputs: tuple[jax.Array, ...],
    *,
    depth: int,
    compute: ComputeConfig,
    layout: Layout,
    period: int = 1,
) -> tuple[jax.Array, BlockStatistics]:
    """Return the residual stream after all blocks, and statistics with a leading layer axis.

    Args:
        block: One module, whose parameters are stacked along a leading axis "layers".
        call: Function (block of one layer, stream, *inputs of the layer) -> (stream, statistics).
        layer_inputs: Arrays with a leading axis of layers, of which every block takes its slice.
        depth: Number of blocks, the size of the axis "layers".
        compute: Compute config. `layers` selects scan or unrolled, `remat` the checkpoint policy.
        layout: Layout on devices. Its method `layer` prepares the parameters of each block.
        period: Number of layers after which masks repeat. Above 1 the block needs `Block.at`.
    """
    graph, state = nnx.split(block)
    stacked = (state, *layer_inputs)
    scan = runs_as_scan(compute, depth, layout=layout)

    def layer(
        place: int, h_BTD: jax.Array, layer_slice: tuple[nnx.State, ...]
    ) -> tuple[jax.Array, BlockStatistics]:
        state, *inputs = layer_slice
        # Under manual FSDP `layout.layer` gathers this layer's matrices and applies their
        # multipliers.
        layer_block: Any = nnx.merge(graph, layout.layer(state, compute.dtype))
        if period > 1:
            layer_block = layer_block.at(place)
        return call(layer_block, checkpoint_name(h_BTD, BLOCK_INPUT), *inputs)

    policy = REMAT[compute.remat] or layout.policy
    layers = []
    for place in range(period):
        place_layer = functools.partial(layer, place)
        if policy is not None:
            # A scan by itself keeps XLA from merging the recomputation with the forward pass.
            place_layer = jax.checkpoint(place_layer, policy=policy, prevent_cse=not scan)
        layers.append(place_layer)

    if scan:

        def layer_at(
            h_BTD: jax.Array, layer_slice: tuple[nnx.State, ...], place: int
        ) -> tuple[jax.Array, BlockStatistics]:
            return layers[place](h_BTD, layer_slice)

        return over_layers(layer_at, h_BTD, stacked, depth, period)
    return _unrolled(layers, h_BTD, stacked, depth)


def _unrolled(
    layers: Sequence[Callable[..., tuple[jax.Array, BlockStatistics]]],
    h_BTD: jax.Array,
    stacked: Any,
    depth: int,
) -> tuple[jax.Array, BlockStatistics]:
    """Apply the layers one after another. Return the stream and the stacked statistics.

    Args:
        layers: Functions that layers use in turn: layer i uses `layers[i % len(layers)]`.
        stacked: Pytree of arrays with a leading axis of `depth` layers.
    """
    # The gradient of one split per stacked array is one concatenation. With an index per layer, the
    # gradient of every slice would be added to an array of the full stack.
    leaves, structure = jax.tree.flatten(stacked)
    split_leaves = [jax.lax.split(jnp.asarray(leaf), [1] * depth) for leaf in leaves]
    statistics = []
    for index, slices in enumerate(zip(*split_leaves, strict=True)):
        squeezed = [jnp.squeeze(array, 0) for array in slices]
        layer_slice = jax.tree.unflatten(structure, squeezed)
        h_BTD, layer_statistics = layers[index % len(layers)](h_BTD, layer_slice)
        statistics.append(layer_statistics)
    return h_BTD, jax.tree.map(lambda *arrays: jnp.stack(arrays), *statistics)
