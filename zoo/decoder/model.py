"""Causal decoder language model, pre-norm.

Shapes: B batch, T positions, D width, V vocabulary, H query heads, K key heads, N head size,
S positions that a key or learned position can have.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.decoder.config import DecoderConfig
from mupax.zoo.definition import Init
from mupax.zoo.layers.cache import Cache
from mupax.zoo.layers.kernels import chosen
from mupax.zoo.layers.linear import Norm, ReadoutInputs
from mupax.zoo.layers.stack import (
    NO_STATISTICS,
    Block,
    BlockStatistics,
    named_logits,
    over_layers,
    run_stack,
    runs_as_scan,
)
from mupax.zoo.partition import ONE_DEVICE, Layout, place


class Decoder(nnx.Module):
    """Causal language model: tokens int32 [B, T] to float32 logits [B, T, V].

    Position t sees tokens 0..t. T is at most config.seq_len.
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = Init(config, rngs)
        self.token = init.param("token")
        self.position = init.maybe("position")
        self.block = Block(config, init.scope("block"))
        self.norm = Norm(config.norm, init.scope("norm"), config.norm_eps)
        self.readout = init.maybe("readout")
        self.readout_bias = init.maybe("readout_bias")
        self.tied_readout = init.factor("tied_readout") if config.tied else None

    def embed(
        self,
        tokens_BT: jax.Array,
        start: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Embed tokens, with learned positions if the model has them. Return [B, T, D].

        Without learned positions, `start` and `positions_BT` are not read. With learned positions,
        every position must be below the model's seq_len. Larger ones that `start` or
        `positions_BT` give get wrong embeddings without an error.

        Args:
            tokens_BT: int32 [batch, position].
            start: Position of the first token, int32 [], or [B] for one per sequence. 0 by default.
            positions_BT: Position of each token, int32. By default they count up from `start`.
        """
        table_VD = self.token[...].astype(self.config.compute.dtype)
        h_BTD = self.layout.lookup(table_VD, tokens_BT, ("vocab", "embed"))
        if self.position is not None:
            table_SD = self.position[...]
            length = tokens_BT.shape[1]
            if start is not None and jnp.ndim(start):
                positions_BT = start[:, None] + jnp.arange(length)
            if positions_BT is not None:
                position_D = table_SD.astype(h_BTD.dtype)[positions_BT]
            elif start is None:
                position_D = table_SD[:length]
            else:
                position_D = jax.lax.dynamic_slice_in_dim(table_SD, start, length)
            # position_D is [T, D], or [B, T, D] if sequences differ in their positions.
            h_BTD = h_BTD + position_D.astype(h_BTD.dtype)
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
        """Run all blocks on the tokens that follow those in the cache, and add these to the cache.

        Return the final residual stream [B, T, D] of the new tokens, and the longer cache.

        Args:
            tokens_BT: New tokens, int32, at most as many as fit into the cache.
            cache: Keys and values of earlier tokens (`mupax.zoo.layers.cache.empty` to begin).
            fresh: True if the cache is empty. Attention then runs as in a call without a cache.
        """
        depth = self.config.depth
        start = None
        if not fresh:
            start = cache.length
        h_BTD = self.embed(tokens_BT, start)
        # `stacked` has a leading axis of layers; `graph` is the same for every layer.
        graph, stacked = nnx.split(self.block)

        def layer(
            stream: tuple[jax.Array, Cache],
            layer_inputs: tuple[jax.Array | int, nnx.State],
            place: int,
        ) -> tuple[Any, None]:
            h_BTD, cache = stream
            index, state = layer_inputs
            block = nnx.merge(graph, state).at(place)
            return block.cached(h_BTD, cache, index, fresh=fresh), None

        # The cache is in the carry, so that XLA updates it in place. As an input and output per
        # layer it would be copied.
        if runs_as_scan(self.config.compute, depth, layout=self.layout):
            layer_inputs = (jnp.arange(depth), stacked)
            (h_BTD, cache), _ = over_layers(
                layer, (h_BTD, cache), layer_inputs, depth, self.block.period
            )
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
        *,
        measure_logits: bool = False,
    ) -> ReadoutInputs:
        """Run the decoder up to its readout.

        Return the final hidden states and the readout matrix, so that a loss can form logits in
        chunks.

        Args:
            tokens_BT: int32 [batch, position].
            segments: Document of each token, int32 [B, T]. A token sees earlier tokens of its own
                document only. By default all tokens are one document.
            positions: Index of each token into the learned positions, int32 [B, T]. 0 to T - 1 by
                default.
            measure_logits: `True` fills the result's `attention_logits`.
        """
        config = self.config
        layout = self.layout
        h_BTD = self.embed(tokens_BT, positions_BT=positions)
        context = () if segments is None else (segments,)

        # The choice of an attention implementation needs only shapes and dtypes, no values.
        q_BTHN = jax.ShapeDtypeStruct(
            (*tokens_BT.shape, config.num_heads, config.heads_dim), h_BTD.dtype
        )
        k_BSKN = jax.ShapeDtypeStruct(
            (*tokens_BT.shape, config.kv_heads, config.heads_dim), h_BTD.dtype
        )
        implementation = chosen(
            config.compute.attention,
            q_BTHN,
            k_BSKN,
            *config.sight,
            apart=segments is not None,
            layout=layout,
        )
        if implementation != "ring":
            h_BTD, statistics = run_stack(
                self.block,
                h_BTD,
                config.depth,
                config.compute,
                *context,
                measure_logits=measure_logits,
                layout=layout,
            )
            return self._readout_inputs(h_BTD, statistics)

        from mupax.zoo.layers.ring import ring

        # Positions are in zig-zag order inside the stack only. They move once before the stack and
        # once after it, not in each layer.
        zigzag_layout = ring.zigzag_layout(layout)
        block = nnx.merge(*nnx.split(self.block))
        place(block, zigzag_layout)
        h_BTD, *context = ring.zigzag(h_BTD, *context, layout=layout)
        h_BTD, statistics = run_stack(
            block,
            h_BTD,
            config.depth,
            config.compute,
            *context,
            measure_logits=measure_logits,
            layout=zigzag_layout,
        )
        (h_BTD,) = ring.zigzag(h_BTD, layout=layout, back=True)
        return self._readout_inputs(h_BTD, statistics)

    def read(self, h_BTD: jax.Array) -> jax.Array:
        """Apply the final norm and the readout. Return float32 logits [B, T, V].

        Args:
            h_BTD: Residual stream after all blocks, as `cached` returns it.
        """
        return self._readout_inputs(h_BTD).logits(self.layout)

    def _readout_inputs(
        self, h_BTD: jax.Array, statistics: BlockStatistics = NO_STATISTICS
    ) -> ReadoutInputs:
        """Apply the final norm, and return its output with the readout matrix.

        Args:
            statistics: Statistics of the blocks, which the result holds as `routing` and
                `attention_logits`.
        """
        bias_V = None if self.readout_bias is None else self.readout_bias[...]
        cap = self.config.logit_softcap
        if cap is not None:
            cap = jnp.float32(cap)
        features_BTD = self.norm(h_BTD)
        if self.readout is not None:
            return ReadoutInputs(
                features_BTD,
                self.readout[...],
                bias=bias_V,
                cap=cap,
                routing=statistics.routing,
                attention_logits=named_logits("block", statistics),
            )
        # A tied readout is the token embedding, times a scale of its own.
        assert self.tied_readout is not None
        return ReadoutInputs(
            features_BTD,
            self.token[...].T,
            scale=self.tied_readout[...],
            bias=bias_V,
            cap=cap,
            routing=statistics.routing,
            attention_logits=named_logits("block", statistics),
        )
