"""Encoder-decoder, pre-norm: relative positions, blocks, the model.

B batch, S encoder and T decoder positions (S keys and T queries of attention), D width, V vocabulary, H heads, K key heads (of a table of
relative positions its buckets), N head dimension.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.layers.linear import Norm, ReadoutInputs, biased, project
from mupax.zoo.layers.masked import attend
from mupax.zoo.layers.stack import MLP, Attention, residual_stack
from mupax.zoo.partition import ONE_DEVICE, Layout

if TYPE_CHECKING:
    from mupax.zoo.layers.cache import Cache


# Relative positions of T5 (Raffel et al. 2019, 1910.10683, section 2.1): distances in buckets, each with a bias per head.


def buckets(
    queries: int,
    keys: int,
    *,
    count: int,
    longest: int,
    bidirectional: bool,
    start: jax.Array | int = 0,
) -> jax.Array:
    """The row of a table for every pair, int32 [T, S].

    Distances below half of a direction's rows have one each; further ones share rows on a logarithmic scale up to `longest`.

    Args:
        queries: T.
        keys: S, from position 0.
        count: rows, K.
        longest: distance from which all share the last row.
        bidirectional: whether keys after a query have rows of their own, half of them; else they are as at distance 0.
        start: position of the first query.
    """
    after_TS = jnp.arange(keys)[None, :] - (start + jnp.arange(queries))[:, None]
    first_TS = jnp.where(after_TS > 0, count // 2, 0) if bidirectional else jnp.zeros_like(after_TS)
    rows = count // 2 if bidirectional else count
    distance_TS = jnp.abs(after_TS) if bidirectional else jnp.maximum(-after_TS, 0)
    exact = rows // 2
    share_TS = jnp.log(jnp.maximum(distance_TS, exact).astype(jnp.float32) / exact) / math.log(
        longest / exact
    )
    far_TS = jnp.minimum(exact + (share_TS * (rows - exact)).astype(jnp.int32), rows - 1)
    return first_TS + jnp.where(distance_TS < exact, distance_TS, far_TS)


def bias(table_KH: jax.Array, row_TS: jax.Array) -> jax.Array:
    """What attention logits get added, float32 [H, T, S].

    Args:
        table_KH: a number per bucket and head.
        row_TS: from `buckets`.
    """
    return jnp.moveaxis(table_KH.astype(jnp.float32)[row_TS], -1, 0)


# Blocks: self-attention that hides padding or adds relative positions, and attention to the encoder.


class SelfAttention(Attention):
    """Attention within one sequence; the encoder's looks both ways."""

    def __init__(self, config: EncoderDecoderConfig, init: Init, *, causal: bool) -> None:
        super().__init__(config, init)
        self.causal = causal

    def __call__(
        self, x_BTD: jax.Array, mask_BS: jax.Array | None, bias_HTS: jax.Array | None
    ) -> jax.Array:
        """The branch [B, T, D].

        Args:
            x_BTD: the stream after its norm.
            mask_BS: bool, False at padding; None: all are seen.
            bias_HTS: added to logits; None: nothing is.
        """
        return self._masked(*self.heads(x_BTD), mask_BS, bias_HTS)

    def cached(
        self, x_BTD: jax.Array, cache: Cache, layer: jax.Array | int, bias_HTS: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        """The branch of the T positions after those in the cache, and the cache with them.

        Args:
            x_BTD: the stream after its norm.
            cache: of all layers.
            layer: which of them this is.
            bias_HTS: added to logits, of all positions the cache has room for.
        """
        q_BTHN, k_BTKN, v_BTKN = self.heads(x_BTD, cache.length)
        cache = cache.put(layer, k_BTKN, v_BTKN)
        return self._projected_out(cache.attend(layer, self._scaled(q_BTHN), bias_HTS)), cache

    def _masked(
        self,
        q_BTHN: jax.Array,
        k_BSKN: jax.Array,
        v_BSKN: jax.Array,
        mask_BS: jax.Array | None,
        bias_HTS: jax.Array | None = None,
    ) -> jax.Array:
        y_BTHN = attend(
            self._scaled(q_BTHN),
            k_BSKN,
            v_BSKN,
            causal=self.causal,
            mask_BS=mask_BS,
            bias_HTS=bias_HTS,
            implementation=self.implementation,
            block=self.block,
            layout=self.layout,
        )
        return self._projected_out(y_BTHN)


class CrossAttention(SelfAttention):
    """Attention of a decoder's positions to all that its encoder wrote; without positions of its own."""

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        super().__init__(config, init, causal=False)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, mask_BS: jax.Array | None
    ) -> jax.Array:
        """The branch [B, T, D].

        Args:
            x_BTD: the decoder's stream after its norm.
            memory_BSD: the encoder's output.
            mask_BS: bool, False at its padding.
        """
        return self.among(x_BTD, self.keys(memory_BSD), mask_BS)

    def among(
        self, x_BTD: jax.Array, keys: tuple[jax.Array, jax.Array], mask_BS: jax.Array | None
    ) -> jax.Array:
        """The same where keys and values are there already.

        Args:
            x_BTD: the decoder's stream after its norm.
            keys: from `keys`.
            mask_BS: bool, False at padding.
        """
        return self._masked(self.queries(x_BTD), *keys, mask_BS)

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, H, N], without the logit scale."""
        q_BTHN = project(x_BTD, self.query[...], kind=self.kind, layout=self.layout)
        q_BTHN = biased(q_BTHN, self.query_bias)
        q_BTHN = q_BTHN if self.query_norm is None else self.query_norm(q_BTHN)
        return self.layout.constrain(q_BTHN, ("batch", "sequence", "heads", None))

    def keys(self, memory_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the encoder's output, [B, S, K, N]."""
        k_BSKN, v_BSKN = (
            project(memory_BSD, w[...], kind=self.kind, layout=self.layout)
            for w in (self.key, self.value)
        )
        k_BSKN, v_BSKN = biased(k_BSKN, self.key_bias), biased(v_BSKN, self.value_bias)
        return k_BSKN if self.key_norm is None else self.key_norm(k_BSKN), v_BSKN


class EncoderBlock(nnx.Module):
    """h <- skip*h + branch*attention(norm(h)), then the same with the MLP."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        kind, eps, then = config.norm, config.norm_eps, config.branch_activation
        self.attention_norm = Norm(kind, init.scope("attention_norm"), eps, then)
        self.attention = SelfAttention(config, init.scope("attention"), causal=False)
        self.mlp_norm = Norm(kind, init.scope("mlp_norm"), eps, then)
        self.mlp = MLP(config, init.scope("mlp"))
        self.skip, self.branch = init.factor("skip"), init.factor("branch")

    def __call__(
        self, h_BSD: jax.Array, mask_BS: jax.Array | None, bias_HSS: jax.Array | None
    ) -> jax.Array:
        h_BSD = self.add_branch(
            h_BSD, 0, self.attention(self.attention_norm(h_BSD), mask_BS, bias_HSS)
        )
        h_BSD = self.add_branch(h_BSD, 1, self.mlp(self.mlp_norm(h_BSD)))
        return self.layout.constrain(h_BSD, ("batch", "sequence", None))

    def add_branch(self, h_BTD: jax.Array, branch: int, y_BTD: jax.Array) -> jax.Array:
        """Return the stream after a branch. Branch scales are applied here only.

        Args:
            h_BTD: the stream before it.
            branch: its number in the block.
            y_BTD: what it made of the stream.
        """
        skip, scale = self.skip[...].astype(h_BTD.dtype), self.branch[...].astype(h_BTD.dtype)
        return skip[branch] * h_BTD + scale[branch] * y_BTD


class DecoderBlock(EncoderBlock):
    """The same with causal attention, and attention to the encoder's output before the MLP."""

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        super().__init__(config, init)
        self.attention.causal = True
        self.cross_norm = Norm(
            config.norm, init.scope("cross_norm"), config.norm_eps, config.branch_activation
        )
        self.cross = CrossAttention(config, init.scope("cross"))

    def __call__(
        self,
        h_BTD: jax.Array,
        memory_BSD: jax.Array,
        mask_BS: jax.Array | None,
        bias_HTT: jax.Array | None,
    ) -> jax.Array:
        """The stream after the block, [B, T, D].

        Args:
            h_BTD: before it.
            memory_BSD: the encoder's output.
            mask_BS: bool, False at its padding.
            bias_HTT: of the decoder's relative positions.
        """
        h_BTD = self.add_branch(
            h_BTD, 0, self.attention(self.attention_norm(h_BTD), None, bias_HTT)
        )
        return self._read_on(h_BTD, self.cross.keys(memory_BSD), mask_BS)

    def cached(
        self,
        h_BTD: jax.Array,
        cache: Cache,
        layer: jax.Array | int,
        keys: tuple[jax.Array, jax.Array],
        mask_BS: jax.Array,
        bias_HTS: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        """The same for the T positions after those in the cache, and the cache with them.

        Args:
            h_BTD: the stream at the new positions.
            cache: of the decoder's own positions, all layers.
            layer: which of them this is.
            keys: of the encoder's output, `CrossAttention.keys` of this layer.
            mask_BS: bool, False at the encoder's padding.
            bias_HTS: of the decoder's relative positions, all that the cache has room for.
        """
        y_BTD, cache = self.attention.cached(self.attention_norm(h_BTD), cache, layer, bias_HTS)
        return self._read_on(self.add_branch(h_BTD, 0, y_BTD), keys, mask_BS), cache

    def _read_on(
        self, h_BTD: jax.Array, keys: tuple[jax.Array, jax.Array], mask_BS: jax.Array | None
    ) -> jax.Array:
        h_BTD = self.add_branch(h_BTD, 1, self.cross.among(self.cross_norm(h_BTD), keys, mask_BS))
        h_BTD = self.add_branch(h_BTD, 2, self.mlp(self.mlp_norm(h_BTD)))
        return self.layout.constrain(h_BTD, ("batch", "sequence", None))


# The model.


class EncoderOutput(NamedTuple):
    """Output of the encoder, as the decoder reads it."""

    keys: jax.Array
    """[L, B, S, K, N], of cross-attention, by layer."""
    values: jax.Array
    """[L, B, S, K, N]."""
    mask: jax.Array
    """Bool [B, S], False at padding."""

    def repeated(self, times: int) -> EncoderOutput:
        """Every input so many times, side by side."""
        keys, values = (jnp.repeat(x, times, axis=1) for x in (self.keys, self.values))
        return EncoderOutput(keys, values, jnp.repeat(self.mask, times, axis=0))


class StackInputOutput(nnx.Module):
    """Modules before and after a stack of blocks: positions, the norm after the embeddings, and the norm after the last block."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: EncoderDecoderConfig, init: Init, *, bidirectional: bool) -> None:
        self.config, self.bidirectional = config, bidirectional
        self.position, self.relative_bias = init.maybe("position"), init.maybe("relative_bias")
        kind, eps = config.norm, config.norm_eps
        self.embedding_norm = (
            Norm(kind, init.scope("embedding_norm"), eps) if config.embedding_norm else None
        )
        self.norm = Norm(kind, init.scope("norm"), eps)

    def first(
        self, table: nnx.Param, tokens_BT: jax.Array, start: jax.Array | None = None
    ) -> jax.Array:
        """The residual stream's first layer, [B, T, D].

        Args:
            table: of token embeddings.
            tokens_BT: int32.
            start: position of the first of them, int32 []; 0 unless given.
        """
        table_VD = table[...].astype(self.config.compute.dtype)
        h_BTD = self.layout.lookup(table_VD, tokens_BT, ("vocab", "embed"))
        if self.position is not None:
            all_SD, length = self.position[...], tokens_BT.shape[1]
            position_TD = (
                all_SD[:length]
                if start is None
                else jax.lax.dynamic_slice_in_dim(all_SD, start, length)
            )
            h_BTD = h_BTD + position_TD.astype(h_BTD.dtype)
        if self.embedding_norm is not None:
            h_BTD = self.embedding_norm(h_BTD)
        return self.layout.constrain(h_BTD, ("batch", "sequence", None))

    def bias(self, queries: int, keys: int, start: jax.Array | int = 0) -> jax.Array | None:
        """What relative positions add to logits, [H, T, S]; None without them.

        Args:
            queries: T.
            keys: S.
            start: position of the first query.
        """
        if self.relative_bias is None:
            return None
        count, longest = self.config.distance_buckets, self.config.longest_distance
        row_TS = buckets(
            queries,
            keys,
            count=count,
            longest=longest,
            bidirectional=self.bidirectional,
            start=start,
        )
        return bias(self.relative_bias[...], row_TS)


class Encoder(StackInputOutput):
    """Tokens to what the decoder attends to."""

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        super().__init__(config, init, bidirectional=True)
        self.token, self.block = init.maybe("token"), EncoderBlock(config, init.scope("block"))


class EncoderDecoder(StackInputOutput):
    """Tokens [B, S] and [B, T] to float32 logits [B, T, V]; target t sees all inputs and decoder inputs 0..t."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs) -> None:
        init = Init(config, rngs)
        super().__init__(config, init, bidirectional=False)
        self.token = init.param("token")
        self.encoder = Encoder(config, init.scope("encoder"))
        self.block = DecoderBlock(config, init.scope("block"))
        self.readout = init.maybe("readout")
        self.tied_readout = init.factor("tied_readout") if config.tied else None

    def __call__(
        self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array
    ) -> jax.Array:
        """Logits.

        Args:
            inputs: of the encoder, int32 [B, S].
            input_mask: int32 [B, S], 0 at padding.
            decoder_inputs: int32 [B, T], the targets shifted right.
        """
        return self.readout_inputs(inputs, input_mask, decoder_inputs).logits(self.layout)

    def readout_inputs(
        self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array
    ) -> ReadoutInputs:
        """Return the features and the readout that logits are made of.

        Args:
            inputs, input_mask, decoder_inputs: as of a call.
        """
        h_BTD, context = self.begin(inputs, input_mask, decoder_inputs)
        h_BTD = residual_stack(
            self.block, h_BTD, self.config.depth, self.config.compute, *context, layout=self.layout
        )
        return self._readout_inputs(h_BTD)

    def begin(
        self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The decoder's first layer, [B, T, D], and what each of its blocks takes beside the stream.

        Args:
            inputs, input_mask, decoder_inputs: as of a call.
        """
        length = decoder_inputs.shape[1]
        context = (self.encode(inputs, input_mask), input_mask > 0, self.bias(length, length))
        return self.embed(decoder_inputs), context

    def embed(self, tokens_BT: jax.Array, start: jax.Array | None = None) -> jax.Array:
        """The decoder's first layer, [B, T, D].

        Args:
            tokens_BT: int32.
            start: position of the first of them, int32 []; 0 unless given.
        """
        return self.first(self.token, tokens_BT, start)

    def encode(self, inputs: jax.Array, input_mask: jax.Array) -> jax.Array:
        """What the decoder attends to, [B, S, D]: the encoder's last layer after its norm.

        Args:
            inputs: int32 [B, S].
            input_mask: int32 [B, S], 0 at padding.
        """
        config, encoder, length = self.config, self.encoder, inputs.shape[1]
        h_BSD = encoder.first(self.token if encoder.token is None else encoder.token, inputs)
        context = (input_mask > 0, encoder.bias(length, length))
        h_BSD = residual_stack(
            encoder.block,
            h_BSD,
            config.encoder_blocks,
            config.compute,
            *context,
            layout=self.layout,
        )
        return encoder.norm(h_BSD)

    def remember(self, inputs: jax.Array, input_mask: jax.Array) -> EncoderOutput:
        """All that the decoder reads of an input, computed once.

        Args:
            inputs, input_mask: as of `encode`.
        """
        memory_BSD, (graph, stacked) = self.encode(inputs, input_mask), nnx.split(self.block)
        keys, values = jax.lax.map(
            lambda state: nnx.merge(graph, state).cross.keys(memory_BSD), stacked
        )
        return EncoderOutput(keys, values, input_mask > 0)

    def cached(
        self, tokens_BT: jax.Array, cache: Cache, memory: EncoderOutput
    ) -> tuple[jax.Array, Cache]:
        """The decoder's last layer, [B, T, D], of the tokens after those in the cache, and the cache with them.

        Args:
            tokens_BT: no more of them than the cache has room for.
            cache: keys and values of what came before (`mupax.zoo.layers.cache.empty`).
            memory: of the inputs, from `remember`.
        """
        (graph, stacked), depth = nnx.split(self.block), self.config.depth
        h_BTD = self.embed(tokens_BT, cache.length)
        bias_HTS = self.bias(tokens_BT.shape[1], cache.keys.shape[3], cache.length)

        def layer(stream: tuple[jax.Array, Cache], of: tuple[Any, ...]) -> tuple[Any, None]:
            (h_BTD, cache), (index, state, *keys) = stream, of
            return nnx.merge(graph, state).cached(
                h_BTD, cache, index, tuple(keys), memory.mask, bias_HTS
            ), None

        each = (jnp.arange(depth), stacked, memory.keys, memory.values)
        h_BTD, cache = jax.lax.scan(layer, (h_BTD, cache), each)[0]
        return h_BTD, cache._replace(length=cache.length + tokens_BT.shape[1])

    def read(self, h_BTD: jax.Array) -> jax.Array:
        """The decoder's last layer, [B, T, D], to float32 logits [B, T, V]."""
        return self._readout_inputs(h_BTD).logits(self.layout)

    def _readout_inputs(self, h_BTD: jax.Array) -> ReadoutInputs:
        if self.readout is not None:
            return ReadoutInputs(self.norm(h_BTD), self.readout[...])
        assert self.tied_readout is not None
        return ReadoutInputs(self.norm(h_BTD), self.token[...].T, scale=self.tied_readout[...])
