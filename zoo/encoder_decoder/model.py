"""Encoder-decoder, pre-norm. B batch, S encoder and T decoder positions, D width, V vocabulary, H heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.encoder_decoder import relative
from mupax.zoo.encoder_decoder.block import DecoderBlock, EncoderBlock
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.layers.linear import Norm, Reading
from mupax.zoo.layers.stack import residual_stack
from mupax.zoo.partition import ONE_DEVICE, Layout

if TYPE_CHECKING:
    from mupax.zoo.layers.cache import Cache


class Memory(NamedTuple):
    """What a decoder reads of one input."""

    keys: jax.Array
    """[L, B, S, K, N], of cross-attention, by layer."""
    values: jax.Array
    """[L, B, S, K, N]."""
    mask: jax.Array
    """Bool [B, S], False at padding."""

    def repeated(self, times: int) -> Memory:
        """Every input so many times, side by side."""
        keys, values = (jnp.repeat(x, times, axis=1) for x in (self.keys, self.values))
        return Memory(keys, values, jnp.repeat(self.mask, times, axis=0))


class Ends(nnx.Module):
    """What is before and after a stack of blocks: positions, the norm after the embeddings, and the norm after the last block."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: EncoderDecoderConfig, init: Init, *, bidirectional: bool) -> None:
        self.config, self.bidirectional = config, bidirectional
        self.position, self.relative_bias = init.maybe("position"), init.maybe("relative_bias")
        kind, eps = config.norm, config.norm_eps
        self.embedding_norm = Norm(kind, init.scope("embedding_norm"), eps) if config.embedding_norm else None
        self.norm = Norm(kind, init.scope("norm"), eps)

    def first(self, table: nnx.Param, tokens_BT: jax.Array, start: jax.Array | None = None) -> jax.Array:
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
            position_TD = all_SD[:length] if start is None else jax.lax.dynamic_slice_in_dim(all_SD, start, length)
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
        row_TS = relative.buckets(
            queries, keys, count=count, longest=longest, bidirectional=self.bidirectional, start=start
        )
        return relative.bias(self.relative_bias[...], row_TS)


class Encoder(Ends):
    """Tokens to what the decoder attends to."""

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        super().__init__(config, init, bidirectional=True)
        self.token, self.block = init.maybe("token"), EncoderBlock(config, init.scope("block"))


class EncoderDecoder(Ends):
    """Tokens [B, S] and [B, T] to float32 logits [B, T, V]; target t sees all inputs and decoder inputs 0..t."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs) -> None:
        init = Init(config, rngs)
        super().__init__(config, init, bidirectional=False)
        self.token = init.param("token")
        self.encoder = Encoder(config, init.scope("encoder"))
        self.block = DecoderBlock(config, init.scope("block"))
        self.readout = init.maybe("readout")
        self.tied_readout = init.factor("tied_readout") if config.tied else None

    def __call__(self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array) -> jax.Array:
        """Logits.

        Args:
            inputs: of the encoder, int32 [B, S].
            input_mask: int32 [B, S], 0 at padding.
            decoder_inputs: int32 [B, T], the targets shifted right.
        """
        return self.reading(inputs, input_mask, decoder_inputs).logits(self.layout)

    def reading(self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array) -> Reading:
        """The same as a `Reading`.

        Args:
            inputs, input_mask, decoder_inputs: as of a call.
        """
        h_BTD, context = self.begin(inputs, input_mask, decoder_inputs)
        h_BTD = residual_stack(self.block, h_BTD, self.config.depth, self.config.compute, *context, layout=self.layout)
        return self._reading(h_BTD)

    def begin(self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array) -> tuple[jax.Array, Any]:
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
            encoder.block, h_BSD, config.encoder_blocks, config.compute, *context, layout=self.layout
        )
        return encoder.norm(h_BSD)

    def remember(self, inputs: jax.Array, input_mask: jax.Array) -> Memory:
        """All that the decoder reads of an input, computed once.

        Args:
            inputs, input_mask: as of `encode`.
        """
        memory_BSD, (graph, stacked) = self.encode(inputs, input_mask), nnx.split(self.block)
        keys, values = jax.lax.map(lambda state: nnx.merge(graph, state).cross.keys(memory_BSD), stacked)
        return Memory(keys, values, input_mask > 0)

    def cached(self, tokens_BT: jax.Array, cache: Cache, memory: Memory) -> tuple[jax.Array, Cache]:
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
            return nnx.merge(graph, state).cached(h_BTD, cache, index, tuple(keys), memory.mask, bias_HTS), None

        each = (jnp.arange(depth), stacked, memory.keys, memory.values)
        h_BTD, cache = jax.lax.scan(layer, (h_BTD, cache), each)[0]
        return h_BTD, cache._replace(length=cache.length + tokens_BT.shape[1])

    def read(self, h_BTD: jax.Array) -> jax.Array:
        """The decoder's last layer, [B, T, D], to float32 logits [B, T, V]."""
        return self._reading(h_BTD).logits(self.layout)

    def _reading(self, h_BTD: jax.Array) -> Reading:
        if self.readout is not None:
            return Reading(self.norm(h_BTD), self.readout[...])
        assert self.tied_readout is not None
        return Reading(self.norm(h_BTD), self.token[...].T, scale=self.tied_readout[...])
