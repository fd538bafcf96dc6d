"""Causal decoder language model, pre-norm. B batch, T positions, D width, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.decoder.config import DecoderConfig
from mupax.zoo.definition import Init
from mupax.zoo.layers.cache import Cache
from mupax.zoo.layers.kernels import chosen
from mupax.zoo.layers.linear import Norm, ReadoutInputs
from mupax.zoo.layers.stack import Block, over_layers, run_stack, runs_as_scan
from mupax.zoo.partition import ONE_DEVICE, Layout, place

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing


class Decoder(nnx.Module):
    """Tokens int32 [B, T] to float32 logits [B, T, V]; position t sees tokens 0..t. T is at most config.seq_len."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = Init(config, rngs)
        self.token, self.position = init.param("token"), init.maybe("position")
        self.block = Block(config, init.scope("block"))
        self.norm = Norm(config.norm, init.scope("norm"), config.norm_eps)
        self.readout, self.readout_bias = init.maybe("readout"), init.maybe("readout_bias")
        self.tied_readout = init.factor("tied_readout") if config.tied else None

    def embed(
        self,
        tokens_BT: jax.Array,
        start: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array:
        """The residual stream's first layer, [B, T, D].

        Args:
            tokens_BT: int32 [batch, position].
            start: position of the first of them, int32 [] or, of each sequence, [B]; 0 unless given.
            positions_BT: of each token, int32; from `start` on unless given.
        """
        table_VD = self.token[...].astype(self.config.compute.dtype)
        h_BTD = self.layout.lookup(table_VD, tokens_BT, ("vocab", "embed"))
        if self.position is not None:
            all_SD, length = self.position[...], tokens_BT.shape[1]
            if start is not None and jnp.ndim(start):
                positions_BT = start[:, None] + jnp.arange(length)
            if positions_BT is not None:
                positions = all_SD.astype(h_BTD.dtype)[positions_BT]
            else:
                positions = (
                    all_SD[:length]
                    if start is None
                    else jax.lax.dynamic_slice_in_dim(all_SD, start, length)
                )
            h_BTD = h_BTD + positions.astype(h_BTD.dtype)
        return self.layout.constrain(h_BTD, ("batch", "sequence", None))

    def __call__(
        self,
        tokens_BT: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        return self.readout_inputs(tokens_BT, segments, positions).logits(self.layout)

    def cached(
        self, tokens_BT: jax.Array, cache: Cache, *, fresh: bool = False
    ) -> tuple[jax.Array, Cache]:
        """The residual stream's last layer, [B, T, D], of the tokens after those in the cache, and the cache with them.

        Args:
            tokens_BT: no more of them than the cache has room for.
            cache: keys and values of what came before (`mupax.zoo.layers.cache.empty`).
            fresh: the cache is empty: attention is then that of a text read whole.
        """
        h_BTD = self.embed(tokens_BT, None if fresh else cache.length)
        (graph, stacked), depth = nnx.split(self.block), self.config.depth

        def layer(
            stream: tuple[jax.Array, Cache], of: tuple[jax.Array | int, nnx.State], place: int
        ) -> tuple[Any, None]:
            (h_BTD, cache), (index, state) = stream, of
            return nnx.merge(graph, state).at(place).cached(h_BTD, cache, index, fresh=fresh), None

        # The cache is carried, not scanned over: it is then written in place, and never copied whole.
        if runs_as_scan(self.config.compute, depth, layout=self.layout):
            each = (jnp.arange(depth), stacked)
            (h_BTD, cache), _ = over_layers(layer, (h_BTD, cache), each, depth, self.block.period)
        else:
            for index in range(depth):
                state = jax.tree.map(lambda array, i=index: array[i], stacked)
                (h_BTD, cache), _ = layer((h_BTD, cache), (index, state), index)
        return h_BTD, cache._replace(length=cache.length + tokens_BT.shape[1])

    def readout_inputs(
        self,
        tokens_BT: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> ReadoutInputs:
        """Return the features and the readout that logits are made of.

        Args:
            tokens_BT: int32 [batch, position].
            segments: int32 [B, T], the document of each token, which sees those before it in the same; all unless given.
            positions: int32 [B, T], learned ones; 0 to T - 1 unless given.
        """
        h_BTD, config, layout = (
            self.embed(tokens_BT, positions_BT=positions),
            self.config,
            self.layout,
        )
        context = () if segments is None else (segments,)
        q_BTHN, k_BSKN = (
            jax.ShapeDtypeStruct((*tokens_BT.shape, heads, config.heads_dim), h_BTD.dtype)
            for heads in (config.num_heads, config.kv_heads)
        )
        implementation = chosen(
            config.compute.attention,
            q_BTHN,
            k_BSKN,
            *config.sight,
            apart=bool(context),
            layout=layout,
        )
        if implementation != "ring":
            h_BTD, routing = run_stack(
                self.block, h_BTD, config.depth, config.compute, *context, layout=layout
            )
            return self._readout_inputs(h_BTD, routing)
        from mupax.zoo.layers.ring import ring

        # Positions are in zig-zag within the stack alone, so that they move once and not in every layer.
        moved = ring.zigzag_layout(layout)
        block = nnx.merge(*nnx.split(self.block))
        place(block, moved)
        h_BTD, *context = ring.zigzag(h_BTD, *context, layout=layout)
        h_BTD, routing = run_stack(
            block, h_BTD, config.depth, config.compute, *context, layout=moved
        )
        (h_BTD,) = ring.zigzag(h_BTD, layout=layout, back=True)
        return self._readout_inputs(h_BTD, routing)

    def read(self, h_BTD: jax.Array) -> jax.Array:
        """The residual stream's last layer, [B, T, D], to float32 logits [B, T, V]."""
        return self._readout_inputs(h_BTD).logits(self.layout)

    def _readout_inputs(self, h_BTD: jax.Array, routing: Routing | None = None) -> ReadoutInputs:
        bias = None if self.readout_bias is None else self.readout_bias[...]
        cap = None if self.config.logit_softcap is None else jnp.float32(self.config.logit_softcap)
        if self.readout is not None:
            return ReadoutInputs(
                self.norm(h_BTD), self.readout[...], bias=bias, cap=cap, routing=routing
            )
        assert self.tied_readout is not None
        return ReadoutInputs(
            self.norm(h_BTD),
            self.token[...].T,
            scale=self.tied_readout[...],
            bias=bias,
            cap=cap,
            routing=routing,
        )
