"""The residual stack: one pre-norm block of attention and MLP or experts, its parameters stacked over depth, run as a scan or unrolled.

Storage does not depend on how the stack runs, so checkpoints serve both. B batch, T query and S key positions, D width, F hidden, H heads,
K key heads, N head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo.definition import Init
from mupax.zoo.families import AttentionName, ComputeConfig
from mupax.zoo.layers import kernels
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
UNROLLED_DEPTH = 16
"""Deepest stack that auto unrolls on CPU: compile time grows with every block."""

CUDNN = "dot_product_attention_fwd_wrapper"
"""Name of the primitive of cuDNN's forward kernel in JAX, which names none of its outputs."""

_policies = jax.checkpoint_policies


class Attention(nnx.Module):
    """softmax(logit_scale * q.k) v, projected out. The preset's logit scale is applied here and nowhere else."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.attention_specs = config.attention_specs
        self.turns = tuple(config.rotary_of(spec) for spec in config.attention_specs)
        self.rotary_size = config.rotary_size
        self.at(0)
        self.implementation: AttentionName = config.compute.attention
        self.block = config.compute.attention_block
        self.fused, self.kind = config.compute.projections == "fused", product_kind(config.compute)
        self.query, self.key, self.value = (init.param(name) for name in ("query", "key", "value"))
        self.out = init.param("out")
        adapters = config.lora.modules(init, "query", "key", "value", "out")
        self.query_lora, self.key_lora, self.value_lora, self.out_lora = adapters
        self.query_bias, self.key_bias = init.maybe("query_bias"), init.maybe("key_bias")
        self.value_bias, self.out_bias = init.maybe("value_bias"), init.maybe("out_bias")
        eps = config.norm_eps
        self.query_norm = (
            Norm(config.qk_norm_kind, init.scope("query_norm"), eps) if config.qk_norm else None
        )
        self.key_norm = (
            Norm(config.qk_norm_kind, init.scope("key_norm"), eps) if config.qk_norm else None
        )
        self.logit_scale = init.factor("logit_scale")

    def at(self, place: int) -> None:
        """Be the attention of layers at this place of the period."""
        self.causal, self.window, self.cap = self.attention_specs[place]
        self.rope_theta, self.rope_scaling = self.turns[place]

    def heads(
        self, x_BTD: jax.Array, start: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, H, N] (without the logit scale), keys and values [B, S, K, N].

        Args:
            x_BTD: the stream after its norm.
            start: position of the first of them, int32 []; 0 unless given.
        """
        q_BTHN, k_BSKN, v_BSKN = self._projected(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHN, k_BSKN = self.query_norm(q_BTHN), self.key_norm(k_BSKN)
        if self.rope_theta is not None:
            q_BTHN = self._turned(q_BTHN, start)
            k_BSKN = self._turned(k_BSKN, start)
        return self.layout.constrain(q_BTHN, ("batch", "sequence", "heads", None)), k_BSKN, v_BSKN

    def _turned(self, x_BTHN: jax.Array, start: jax.Array | None) -> jax.Array:
        """Return queries or keys with rotary positions."""
        assert self.rope_theta is not None
        return rotary(
            x_BTHN, self.rope_theta, start, self.rope_scaling, self.rotary_size, layout=self.layout
        )

    def _projected(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        query_DHN, key_DKN, value_DKN = self.query[...], self.key[...], self.value[...]
        if self.fused:
            # Every key head beside its queries, so that heads stay split as they are.
            width, kv_heads, size = key_DKN.shape
            query_DKGN = query_DHN.reshape(width, kv_heads, -1, size)
            each_DKGN = jnp.concatenate(
                [query_DKGN, key_DKN[:, :, None], value_DKN[:, :, None]], axis=2
            )
            y_BTKGN = project(x_BTD, each_DKGN, kind=self.kind, layout=self.layout)
            q_BTHN = y_BTKGN[..., :-2, :].reshape(*x_BTD.shape[:-1], *query_DHN.shape[1:])
            k_BSKN, v_BSKN = y_BTKGN[..., -2, :], y_BTKGN[..., -1, :]
        else:
            q_BTHN, k_BSKN, v_BSKN = (
                project(x_BTD, w, kind=self.kind, layout=self.layout)
                for w in (query_DHN, key_DKN, value_DKN)
            )
        q_BTHN, k_BSKN = (
            adapted(q_BTHN, x_BTD, self.query_lora),
            adapted(k_BSKN, x_BTD, self.key_lora),
        )
        v_BSKN = adapted(v_BSKN, x_BTD, self.value_lora)
        return (
            biased(q_BTHN, self.query_bias),
            biased(k_BSKN, self.key_bias),
            biased(v_BSKN, self.value_bias),
        )

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        return self._attended(*self.heads(x_BTD), segments_BT)

    def cached(
        self, x_BTD: jax.Array, cache: Cache, layer: jax.Array | int, *, fresh: bool
    ) -> tuple[jax.Array, Cache]:
        """The same for the T positions after those in the cache, and the cache with them.

        Args:
            x_BTD: inputs.
            cache: of all layers.
            layer: which of them this is.
            fresh: the cache is empty: the new positions see only one another.
        """
        q_BTHN, k_BTKN, v_BTKN = self.heads(x_BTD, None if fresh else cache.length)
        cache = cache.put(layer, k_BTKN, v_BTKN)
        if fresh:
            return self._attended(q_BTHN, k_BTKN, v_BTKN), cache
        sight = {"window": self.window, "cap": self.cap}
        return self._projected_out(cache.attend(layer, self._scaled(q_BTHN), **sight)), cache

    def _attended(
        self,
        q_BTHN: jax.Array,
        k_BSKN: jax.Array,
        v_BSKN: jax.Array,
        segments_BT: jax.Array | None = None,
    ) -> jax.Array:
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
        return q_BTHN * self.logit_scale[...].astype(q_BTHN.dtype)

    def _projected_out(self, y_BTHN: jax.Array) -> jax.Array:
        y_BTHN = self.layout.constrain(y_BTHN, ("batch", "sequence", "heads", None))
        y_BTD = project(y_BTHN, self.out[...], inputs=2, kind=self.kind, layout=self.layout)
        return biased(adapted(y_BTD, y_BTHN, self.out_lora, inputs=2), self.out_bias)


WIDE = 4096
"""Width from which a gate is kept out of products on TPU: at 4096 (lm-8b, v5e:16x16) it saves 4.6 of 53.3 M cycles of a layer's
backward pass, at 2048 (1.2 B, v5e:4x4) it would cost 3.7 of 36.8 M of both passes."""


def _alone(x: Any, width: int, platform: str) -> Any:
    """Keep x in memory between products on TPU, where each would compute it anew, if the model is wide enough."""
    return jax.lax.optimization_barrier(x) if platform == "tpu" and width >= WIDE else x


class MLP(nnx.Module):
    """W_out act(W_in x), or W_out (silu(W_gate x) * W_up x)."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.activation = config.activation
        self.fused, self.kind = config.compute.projections == "fused", product_kind(config.compute)
        self.up, self.gate, self.down = init.param("up"), init.maybe("gate"), init.param("down")
        self.up_lora, self.gate_lora, self.down_lora = config.lora.modules(
            init, "up", "gate", "down"
        )
        self.up_bias, self.gate_bias = init.maybe("up_bias"), init.maybe("gate_bias")
        self.down_bias = init.maybe("down_bias")

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF, g_BTF = self._projected(x_BTD)
        if g_BTF is not None:
            width, platform = x_BTD.shape[-1], self.layout.platform
            h_BTF, g_BTF = _alone((h_BTF, g_BTF), width, platform)
            h_BTF = _alone(GATES[self.activation](g_BTF) * h_BTF, width, platform)
        elif self.activation == "relu":
            h_BTF = jax.nn.relu(h_BTF)
        else:
            h_BTF = jax.nn.gelu(h_BTF, approximate=self.activation != "gelu_exact")
        h_BTF = self.layout.constrain(h_BTF, ("batch", "sequence", "mlp"))
        y_BTD = project(h_BTF, self.down[...], kind=self.kind, layout=self.layout)
        return biased(adapted(y_BTD, h_BTF, self.down_lora), self.down_bias)

    def _projected(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Up and, where there is one, gate, both [B, T, F]."""
        if self.gate is None:
            up_BTF = project(x_BTD, self.up[...], kind=self.kind, layout=self.layout)
            up_BTF = adapted(up_BTF, x_BTD, self.up_lora)
            return biased(up_BTF, self.up_bias), None
        if self.fused:
            # Side by side on an axis of their own, so that F stays split as it is.
            up_gate_D2F = jnp.stack([self.up[...], self.gate[...]], axis=1)
            pair_BT2F = project(x_BTD, up_gate_D2F, kind=self.kind, layout=self.layout)
            up_BTF, gate_BTF = jnp.moveaxis(pair_BT2F, -2, 0)
        else:
            up_BTF, gate_BTF = (
                project(x_BTD, w[...], kind=self.kind, layout=self.layout)
                for w in (self.up, self.gate)
            )
        up_BTF, gate_BTF = (
            adapted(y, x_BTD, of) for y, of in ((up_BTF, self.up_lora), (gate_BTF, self.gate_lora))
        )
        return biased(up_BTF, self.up_bias), biased(gate_BTF, self.gate_bias)


def _experts(config: TransformerConfig, init: Init) -> Experts:
    """The layer of experts, whose modules no model without experts loads."""
    from mupax.zoo.experts.layer import Experts

    return Experts(config, init)


class Block(nnx.Module):
    """h <- skip*h + branch*gain*norm(attention(norm(h))), then the same with the MLP; most have no outer norm, and no gain.

    Branch scales and gains are applied here only.
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        kind, eps, then = config.norm, config.norm_eps, config.branch_activation
        self.attention_norm = Norm(kind, init.scope("attention_norm"), eps, then)
        self.attention = Attention(config, init.scope("attention"))
        self.mlp_norm = Norm(kind, init.scope("mlp_norm"), eps, then)
        self.mlp = MLP(config, init.scope("mlp")) if config.dense_dim else None
        self.experts = _experts(config, init.scope("experts")) if config.experts else None
        self.attention_gain, self.mlp_gain = init.maybe("attention_gain"), init.maybe("mlp_gain")
        self.post_norm = Norm(kind, init.scope("post_norm"), eps) if config.post_norms else None
        self.skip, self.branch = init.factor("skip"), init.factor("branch")
        self.parallel = config.parallel_branches

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        return self.routed(h_BTD)[0]

    def routed(
        self,
        h_BTD: jax.Array,
        segments_BT: jax.Array | None = None,
        scale_B2: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """The stream after the block, and what its router did, None without experts.

        Args:
            h_BTD: the stream before it.
            segments_BT: as `kernels.attend`.
            scale_B2: what each branch is taken times for each example; as it is unless given.
        """
        return self._after(
            h_BTD, self.attention(self.attention_norm(h_BTD), segments_BT), scale_B2=scale_B2
        )

    @property
    def period(self) -> int:
        """Layers after which what attention sees begins anew."""
        return len(self.attention.attention_specs)

    def at(self, layer: int) -> Block:
        """This block as that of a layer, whose place within the period counts."""
        self.attention.at(layer % self.period)
        return self

    def cached(
        self, h_BTD: jax.Array, cache: Cache, layer: jax.Array | int, *, fresh: bool
    ) -> tuple[jax.Array, Cache]:
        """The same for the T positions after those in the cache, and the cache with them.

        Args:
            h_BTD: the stream at the new positions.
            cache: of all layers.
            layer: which of them this is.
            fresh: as `Attention.cached`.
        """
        y_BTD, cache = self.attention.cached(self.attention_norm(h_BTD), cache, layer, fresh=fresh)
        return self._after(h_BTD, y_BTD, dropless=True)[0], cache

    def add_branch(
        self, h_BTD: jax.Array, place: int, y_BTD: jax.Array, scale_B2: jax.Array | None = None
    ) -> jax.Array:
        """Return the stream after a branch.

        Args:
            h_BTD: the stream before it.
            place: of the branch, 0 attention's and 1 the MLP's.
            y_BTD: what it made of the stream.
            scale_B2: as in `routed`.
        """
        skip, branch = self.skip[...].astype(h_BTD.dtype), self.branch[...].astype(h_BTD.dtype)
        gain = (self.attention_gain, self.mlp_gain)[place]
        y_BTD = y_BTD if self.post_norm is None else self.post_norm(y_BTD)
        y_BTD = y_BTD if gain is None else y_BTD * gain[...].astype(y_BTD.dtype)
        if scale_B2 is not None:
            y_BTD = y_BTD * scale_B2[:, place, None, None].astype(y_BTD.dtype)
        return skip[place] * h_BTD + branch[place] * y_BTD

    def _after(
        self,
        h_BTD: jax.Array,
        attention_BTD: jax.Array,
        *,
        dropless: bool = False,
        scale_B2: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        before_BTD, h_BTD = h_BTD, self.add_branch(h_BTD, 0, attention_BTD, scale_B2)
        x_BTD, routing = self.mlp_norm(before_BTD if self.parallel else h_BTD), None
        if self.experts is None:
            assert self.mlp is not None
            y_BTD = self.mlp(x_BTD)
        else:
            y_BTD, routing = self.experts(x_BTD, dropless=dropless)
            y_BTD = y_BTD if self.mlp is None else self.mlp(x_BTD) + y_BTD
        h_BTD = self.add_branch(h_BTD, 1, y_BTD, scale_B2)
        return self.layout.constrain(h_BTD, ("batch", "sequence", None)), routing


def _of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == CUDNN


_attended = _policies.save_from_both_policies(_policies.save_only_these_names(SAVED), _of_cudnn)
REMAT = {
    "none": None,
    "dots": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _attended
    ),
    "attention": _attended,
    "block": _policies.nothing_saveable,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What the backward pass may keep of a block; everything else it recomputes.

none: everything. dots: matrix products, and what a flash kernel's gradient needs: its outputs and the softmax's norm. attention: the
latter and the block's input, so that the kernel runs forward once. block: nothing but its input, which lies in the host's memory with
offload.
"""


def runs_as_scan(compute: ComputeConfig, depth: int, *, layout: Layout = ONE_DEVICE) -> bool:
    """Return whether the stack is a loop.

    auto: not on CPU, where a loop copies every layer's weights and gradients out of and into the stack, a tenth to a
    quarter of a step (`python -m scripts.bench.step.layers`); elsewhere it is one, for the compile time of deep models.

    Args:
        compute: whose `layers` says auto, scan or unrolled.
        depth: blocks in the stack.
        layout: of the devices that the stack is compiled for.
    """
    if compute.layers == "auto":
        return layout.platform != "cpu" or depth > UNROLLED_DEPTH
    return compute.layers == "scan"


def over_layers(
    layer: Callable[[Any, Any, int], tuple[Any, Any]],
    first: Any,
    stacked: Any,
    depth: int,
    period: int = 1,
) -> tuple[Any, Any]:
    """What comes out of the last layer, and what each gives, stacked.

    A loop whose body is `period` layers, each with its own program; layers that are left over follow it.

    Args:
        layer: (what comes in, its part of `stacked`, its place in the period) to what comes out, and what it gives.
        first: what comes into the first layer.
        stacked: arrays with a leading axis of layers.
        depth: size of that axis.
        period: layers after which programs begin anew.
    """
    if period == 1:
        return jax.lax.scan(lambda x, of: layer(x, of, 0), first, stacked)

    def several(x: Any, of: Any, count: int) -> tuple[Any, Any]:
        outputs = []
        for place in range(count):
            x, y = layer(x, jax.tree.map(lambda array, i=place: array[i], of), place)
            outputs.append(y)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

    whole, parts = depth // period * period, []
    if whole:
        groups = jax.tree.map(
            lambda array: array[:whole].reshape(-1, period, *array.shape[1:]), stacked
        )
        first, of_groups = jax.lax.scan(lambda x, of: several(x, of, period), first, groups)
        parts.append(jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), of_groups))
    if whole < depth:
        first, rest = several(
            first, jax.tree.map(lambda array: array[whole:], stacked), depth - whole
        )
        parts.append(rest)
    return first, jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


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
        block: one module, its parameters stacked along a leading "layers" axis.
        h_BTD: the stream before the first block.
        depth: size of that axis.
        compute: whether the stack is a loop, and what its backward pass keeps.
        *context: what every block takes beside the stream.
        layout: how arrays lie on devices; a block with a field `layout` has it there already.
    """
    return _stack(
        block, lambda block, h_BTD: (block(h_BTD, *context), None), h_BTD, depth, compute, layout
    )[0]


def run_stack(
    block: Block,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    *context: Any,
    scale_BL2: jax.Array | None = None,
    layout: Layout = ONE_DEVICE,
) -> tuple[jax.Array, Routing | None]:
    """Apply all blocks.

    Return the residual stream and the routing statistics (averaged over blocks, counts summed), None without experts.

    Args:
        block, h_BTD, depth, compute, *context, layout: as `residual_stack`.
        scale_BL2: what every branch is taken times, of an example, a block and its two branches; each as it is unless given.
    """
    each = () if scale_BL2 is None else (jnp.swapaxes(scale_BL2, 0, 1),)

    def call(
        block: Block, h_BTD: jax.Array, scale_B2: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None]:
        return block.routed(h_BTD, *context, scale_B2=scale_B2)

    return _stack(block, call, h_BTD, depth, compute, layout, block.period, *each)


def _stack(
    block: nnx.Module,
    call: Callable,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    layout: Layout,
    period: int = 1,
    *each_layer: jax.Array,
) -> tuple:
    """The stream after all blocks, and what they give beside it; of a period each is called as `Block.at` its place.

    What is in `each_layer` has a first axis of layers, and every block takes its own.
    """
    graph, state = nnx.split(block)
    stacked = (state, *each_layer)
    scan = runs_as_scan(compute, depth, layout=layout)

    def layer(
        place: int, h_BTD: jax.Array, of_layer: tuple[nnx.State, ...]
    ) -> tuple[jax.Array, Routing | None]:
        state, *inputs = of_layer
        own: Any = nnx.merge(graph, layout.layer(state, compute.dtype))
        return call(
            own if period == 1 else own.at(place), checkpoint_name(h_BTD, BLOCK_INPUT), *inputs
        )

    layers = [functools.partial(layer, place) for place in range(period)]
    if (policy := REMAT[compute.remat] or layout.policy) is not None:
        # Inside a scan the loop already keeps XLA from merging the recomputation with the forward pass.
        layers = [jax.checkpoint(one, policy=policy, prevent_cse=not scan) for one in layers]
    if scan:
        h_BTD, each = over_layers(
            lambda x, of, place: layers[place](x, of), h_BTD, stacked, depth, period
        )
        return h_BTD, each and each.over_blocks()
    # Split at once, so that gradients are written side by side at once: of a slice each, every one is added into a whole stack.
    leaves, structure = jax.tree.flatten(stacked)
    each = [jax.lax.split(jnp.asarray(leaf), [1] * depth) for leaf in leaves]
    routings = []
    for i, slices in enumerate(zip(*each, strict=True)):
        of_layer = jax.tree.unflatten(structure, [jnp.squeeze(array, 0) for array in slices])
        h_BTD, routing = layers[i % period](h_BTD, of_layer)
        routings += [] if routing is None else [routing]
    return h_BTD, jax.tree.map(
        lambda *numbers: jnp.stack(numbers), *routings
    ).over_blocks() if routings else None
