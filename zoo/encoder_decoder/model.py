"""Encoder-decoder module: pre-norm blocks, relative positions and the whole model.

Shape suffixes: B batch, S encoder and T decoder positions (in attention S keys and T queries),
D width, V vocabulary, H heads, K key heads (of a table of relative positions its buckets), N head
dimension, L decoder layers.
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
from mupax.zoo.layers.stack import (
    MLP,
    Attention,
    BlockStatistics,
    measured_stack,
    named_logits,
    residual_stack,
)
from mupax.zoo.partition import ONE_DEVICE, Layout

if TYPE_CHECKING:
    from mupax.zoo.layers.cache import Cache


# Relative positions of T5 (Raffel et al. 2019, 1910.10683, section 2.1): distances in buckets, each
# with a bias per head.


def buckets(
    queries: int,
    keys: int,
    *,
    count: int,
    longest: int,
    bidirectional: bool,
    start: jax.Array | int = 0,
) -> jax.Array:
    """Return T5's relative-position bucket of every pair of a query and a key, int32 [T, S].

    In each direction, distances below half of the direction's buckets have a bucket each. Longer
    distances share buckets on a logarithmic scale up to `longest`.

    Args:
        queries: Number of queries T. Their positions begin at `start`.
        keys: Number of keys S. Their positions begin at 0.
        count: Number of buckets K, a multiple of 4.
        longest: Distance from which all pairs share the last bucket of their direction. It must be
            above half of a direction's buckets.
        bidirectional: `True` gives half of the buckets to keys after the query. `False` gives all
            to keys before the query, and puts keys after the query into the bucket of distance 0.
        start: Position of the first query, by default 0.
    """
    key_1S = jnp.arange(keys)[None, :]
    query_T1 = (start + jnp.arange(queries))[:, None]
    after_TS = key_1S - query_T1
    if bidirectional:
        # The second half of the buckets is for keys after the query.
        direction_count = count // 2
        first_TS = jnp.where(after_TS > 0, count // 2, 0)
        distance_TS = jnp.abs(after_TS)
    else:
        # Keys after the query share the bucket of distance 0. Causal attention hides them anyway.
        direction_count = count
        first_TS = jnp.zeros_like(after_TS)
        distance_TS = jnp.maximum(-after_TS, 0)

    exact_count = direction_count // 2
    # Short distances are raised to `exact_count` first: log(0) would be -inf.
    ratio_TS = jnp.maximum(distance_TS, exact_count).astype(jnp.float32) / exact_count
    share_TS = jnp.log(ratio_TS) / math.log(longest / exact_count)
    steps_TS = (share_TS * (direction_count - exact_count)).astype(jnp.int32)
    far_TS = jnp.minimum(exact_count + steps_TS, direction_count - 1)
    return first_TS + jnp.where(distance_TS < exact_count, distance_TS, far_TS)


# Blocks: self-attention with padding masks and relative positions, and attention to the encoder.


class SelfAttention(Attention):
    """Attention within one sequence, causal in the decoder and bidirectional in the encoder."""

    def __init__(self, config: EncoderDecoderConfig, init: Init, *, causal: bool) -> None:
        super().__init__(config, init)
        self.causal = causal

    def __call__(
        self, x_BTD: jax.Array, mask_BS: jax.Array | None, bias_HTS: jax.Array | None
    ) -> jax.Array:
        """Return the output of the attention branch, [B, T, D].

        Args:
            x_BTD: Residual stream after the block's norm, [B, T, D].
            mask_BS: Bool [B, S], False at padding. `None` attends to all positions.
            bias_HTS: Bias of the attention logits. `None` adds nothing.
        """
        q_BTHN, k_BSKN, v_BSKN = self.heads(x_BTD)
        return self._masked(q_BTHN, k_BSKN, v_BSKN, mask_BS, bias_HTS)

    def with_logits(
        self, x_BTD: jax.Array, mask_BS: jax.Array | None, bias_HTS: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the attention output [B, T, D] and the largest logit of each head, float32 [H].

        The bias of relative positions is not part of the largest logit.

        Args:
            x_BTD, mask_BS, bias_HTS: Same as in a call.
        """
        q_BTHN, k_BSKN, v_BSKN = self.heads(x_BTD)
        y_BTD = self._masked(q_BTHN, k_BSKN, v_BSKN, mask_BS, bias_HTS)
        return y_BTD, self._largest_logits(q_BTHN, k_BSKN, mask_BS=mask_BS)

    def cached(
        self, x_BTD: jax.Array, cache: Cache, layer: jax.Array | int, bias_HTS: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        """Return the attention output [B, T, D] of T new positions, and the updated cache.

        The returned cache also holds the keys and values of the new positions. Its `length` is not
        increased yet, because other layers still write to the same positions.

        Args:
            x_BTD: Residual stream after the block's norm, at the positions after those in `cache`.
            cache: Keys and values of self-attention in all layers.
            layer: Index of this layer in the cache.
            bias_HTS: Bias of the attention logits. S is the number of positions that the cache can
                hold.
        """
        q_BTHN, k_BTKN, v_BTKN = self.heads(x_BTD, cache.length)
        cache = cache.put(layer, k_BTKN, v_BTKN)
        y_BTHN = cache.attend(layer, self._scaled(q_BTHN), bias_HTS)
        return self._projected_out(y_BTHN), cache

    def _masked(
        self,
        q_BTHN: jax.Array,
        k_BSKN: jax.Array,
        v_BSKN: jax.Array,
        mask_BS: jax.Array | None,
        bias_HTS: jax.Array | None = None,
    ) -> jax.Array:
        """Return the attention output, projected to the residual stream's width, [B, T, D].

        Args:
            q_BTHN: Queries without the logit scale, which is applied here.
            mask_BS: Bool [B, S], False at padding. `None` attends to all positions.
            bias_HTS: Bias of the attention logits. `None` adds nothing.
        """
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
    """Attention of decoder positions to the whole encoder output, without position information."""

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        super().__init__(config, init, causal=False)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, mask_BS: jax.Array | None
    ) -> jax.Array:
        """Return the output of the cross-attention branch, [B, T, D].

        Args:
            x_BTD: Residual stream of the decoder after the block's norm.
            memory_BSD: Encoder output after its final norm, [B, S, D].
            mask_BS: Bool [B, S], False at padding of the encoder.
        """
        keys_and_values = self.keys(memory_BSD)
        return self.attend_to(x_BTD, keys_and_values, mask_BS)

    def attend_to(
        self,
        x_BTD: jax.Array,
        keys_and_values: tuple[jax.Array, jax.Array],
        mask_BS: jax.Array | None,
    ) -> jax.Array:
        """Return the output of the cross-attention branch [B, T, D] from given keys and values.

        Args:
            x_BTD: Residual stream of the decoder after the block's norm.
            keys_and_values: Two arrays [B, S, K, N], as `keys` returns them.
            mask_BS: Bool [B, S], False at padding of the encoder.
        """
        k_BSKN, v_BSKN = keys_and_values
        return self._masked(self.queries(x_BTD), k_BSKN, v_BSKN, mask_BS)

    def attend_with_logits(
        self,
        x_BTD: jax.Array,
        keys_and_values: tuple[jax.Array, jax.Array],
        mask_BS: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the cross-attention output [B, T, D] and each head's largest logit, float32 [H].

        Args:
            x_BTD, keys_and_values, mask_BS: Same as in `attend_to`.
        """
        k_BSKN, v_BSKN = keys_and_values
        q_BTHN = self.queries(x_BTD)
        y_BTD = self._masked(q_BTHN, k_BSKN, v_BSKN, mask_BS)
        return y_BTD, self._largest_logits(q_BTHN, k_BSKN, mask_BS=mask_BS)

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """Return the queries [B, T, H, N], not yet multiplied by the logit scale."""
        q_BTHN = project(x_BTD, self.query[...], kind=self.kind, layout=self.layout)
        q_BTHN = biased(q_BTHN, self.query_bias)
        if self.query_norm is not None:
            q_BTHN = self.query_norm(q_BTHN)
        return self.layout.constrain(q_BTHN, ("batch", "sequence", "heads", None))

    def keys(self, memory_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and the values of the encoder output, each [B, S, K, N]."""
        k_BSKN = project(memory_BSD, self.key[...], kind=self.kind, layout=self.layout)
        v_BSKN = project(memory_BSD, self.value[...], kind=self.kind, layout=self.layout)
        k_BSKN = biased(k_BSKN, self.key_bias)
        v_BSKN = biased(v_BSKN, self.value_bias)
        if self.key_norm is not None:
            k_BSKN = self.key_norm(k_BSKN)
        return k_BSKN, v_BSKN


class EncoderBlock(nnx.Module):
    """Encoder block: h <- skip*h + branch*attention(norm(h)), then likewise with the MLP."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        kind = config.norm
        eps = config.norm_eps
        activation = config.branch_activation
        self.attention_norm = Norm(kind, init.scope("attention_norm"), eps, activation)
        self.attention = SelfAttention(config, init.scope("attention"), causal=False)
        self.mlp_norm = Norm(kind, init.scope("mlp_norm"), eps, activation)
        self.mlp = MLP(config, init.scope("mlp"))
        self.skip = init.factor("skip")
        self.branch = init.factor("branch")

    def __call__(
        self, h_BSD: jax.Array, mask_BS: jax.Array | None, bias_HSS: jax.Array | None
    ) -> jax.Array:
        """Return the residual stream after the block, [B, S, D].

        Args:
            h_BSD: Residual stream before the block, [B, S, D].
            mask_BS: Bool [B, S], False at padding.
            bias_HSS: Bias of the attention logits. `None` adds nothing.
        """
        attention_BSD = self.attention(self.attention_norm(h_BSD), mask_BS, bias_HSS)
        return self._add_branches(h_BSD, attention_BSD)

    def measured(
        self, h_BSD: jax.Array, mask_BS: jax.Array | None, bias_HSS: jax.Array | None
    ) -> tuple[jax.Array, BlockStatistics]:
        """Return the residual stream after the block, and its largest attention logits.

        `attention_logits` has the key "attention", float32 [H].

        Args:
            h_BSD, mask_BS, bias_HSS: Same as in a call.
        """
        x_BSD = self.attention_norm(h_BSD)
        attention_BSD, logits_H = self.attention.with_logits(x_BSD, mask_BS, bias_HSS)
        h_BSD = self._add_branches(h_BSD, attention_BSD)
        return h_BSD, BlockStatistics(attention_logits={"attention": logits_H})

    def _add_branches(self, h_BSD: jax.Array, attention_BSD: jax.Array) -> jax.Array:
        """Return the residual stream after the attention branch and then the MLP branch."""
        h_BSD = self.add_branch(h_BSD, 0, attention_BSD)
        mlp_BSD = self.mlp(self.mlp_norm(h_BSD))
        h_BSD = self.add_branch(h_BSD, 1, mlp_BSD)
        return self.layout.constrain(h_BSD, ("batch", "sequence", None))

    def add_branch(self, h_BTD: jax.Array, branch: int, y_BTD: jax.Array) -> jax.Array:
        """Return skip * h + branch * y, the residual stream after a branch.

        Skip and branch factors are applied nowhere else.

        Args:
            branch: Index of the branch in the block: 0 for attention and 1 for the MLP. In a
                decoder, 1 is cross-attention and 2 the MLP.
        """
        skip = self.skip[...].astype(h_BTD.dtype)
        scale = self.branch[...].astype(h_BTD.dtype)
        return skip[branch] * h_BTD + scale[branch] * y_BTD


class DecoderBlock(EncoderBlock):
    """Decoder block: causal self-attention, attention to the encoder output, then the MLP."""

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
        """Return the residual stream after the block, [B, T, D].

        Args:
            h_BTD: Residual stream before the block, [B, T, D].
            memory_BSD: Encoder output after its final norm, [B, S, D].
            mask_BS: Bool [B, S], False at padding of the encoder.
            bias_HTT: Bias of the self-attention logits. `None` adds nothing.
        """
        # No padding mask: attention is causal, and padding comes after the tokens.
        attention_BTD = self.attention(self.attention_norm(h_BTD), None, bias_HTT)
        h_BTD = self.add_branch(h_BTD, 0, attention_BTD)
        keys_and_values = self.cross.keys(memory_BSD)
        return self._add_cross_and_mlp(h_BTD, keys_and_values, mask_BS)

    def measured(
        self,
        h_BTD: jax.Array,
        memory_BSD: jax.Array,
        mask_BS: jax.Array | None,
        bias_HTT: jax.Array | None,
    ) -> tuple[jax.Array, BlockStatistics]:
        """Return the residual stream after the block, and its largest attention logits.

        `attention_logits` has the keys "attention" and "cross", each float32 [H].

        Args:
            h_BTD, memory_BSD, mask_BS, bias_HTT: Same as in a call.
        """
        x_BTD = self.attention_norm(h_BTD)
        attention_BTD, own_logits_H = self.attention.with_logits(x_BTD, None, bias_HTT)
        h_BTD = self.add_branch(h_BTD, 0, attention_BTD)
        keys_and_values = self.cross.keys(memory_BSD)
        cross_BTD, cross_logits_H = self.cross.attend_with_logits(
            self.cross_norm(h_BTD), keys_and_values, mask_BS
        )
        h_BTD = self._add_cross_branch_and_mlp(h_BTD, cross_BTD)
        attention_logits = {"attention": own_logits_H, "cross": cross_logits_H}
        return h_BTD, BlockStatistics(attention_logits=attention_logits)

    def cached(
        self,
        h_BTD: jax.Array,
        cache: Cache,
        layer: jax.Array | int,
        keys_and_values: tuple[jax.Array, jax.Array],
        mask_BS: jax.Array,
        bias_HTS: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        """Return the residual stream after the block at T new positions, and the updated cache.

        The returned cache also holds the keys and values of the new positions. Its `length` is not
        increased yet, because other layers still write to the same positions.

        Args:
            h_BTD: Residual stream before the block, at the positions after those in `cache`.
            cache: Keys and values of the decoder's self-attention in all layers.
            layer: Index of this layer in the cache.
            keys_and_values: Result of `CrossAttention.keys` in this layer, two arrays [B, S, K, N].
            mask_BS: Bool [B, S], False at padding of the encoder.
            bias_HTS: Bias of the self-attention logits. S is the number of positions that the cache
                can hold.
        """
        x_BTD = self.attention_norm(h_BTD)
        attention_BTD, cache = self.attention.cached(x_BTD, cache, layer, bias_HTS)
        h_BTD = self.add_branch(h_BTD, 0, attention_BTD)
        return self._add_cross_and_mlp(h_BTD, keys_and_values, mask_BS), cache

    def _add_cross_and_mlp(
        self,
        h_BTD: jax.Array,
        keys_and_values: tuple[jax.Array, jax.Array],
        mask_BS: jax.Array | None,
    ) -> jax.Array:
        """Compute cross-attention and the MLP. Return the residual stream after both branches."""
        cross_BTD = self.cross.attend_to(self.cross_norm(h_BTD), keys_and_values, mask_BS)
        return self._add_cross_branch_and_mlp(h_BTD, cross_BTD)

    def _add_cross_branch_and_mlp(self, h_BTD: jax.Array, cross_BTD: jax.Array) -> jax.Array:
        """Add cross-attention's output, then the MLP branch. Return the residual stream."""
        h_BTD = self.add_branch(h_BTD, 1, cross_BTD)
        mlp_BTD = self.mlp(self.mlp_norm(h_BTD))
        h_BTD = self.add_branch(h_BTD, 2, mlp_BTD)
        return self.layout.constrain(h_BTD, ("batch", "sequence", None))


class EncoderOutput(NamedTuple):
    """Encoder output in the form that cached decoding reads: keys and values of cross-attention."""

    keys: jax.Array
    """Keys, [L, B, S, K, N]."""
    values: jax.Array
    """Values, [L, B, S, K, N]."""
    mask: jax.Array
    """Bool [B, S], False at padding."""

    def repeated(self, times: int) -> EncoderOutput:
        """Return the output with every example repeated `times` times in adjacent rows."""
        keys = jnp.repeat(self.keys, times, axis=1)
        values = jnp.repeat(self.values, times, axis=1)
        return EncoderOutput(keys, values, jnp.repeat(self.mask, times, axis=0))


class StackInputOutput(nnx.Module):
    """Modules around a stack of blocks: positions, the norm of the embeddings, the final norm.

    Args:
        bidirectional: Whether relative positions distinguish keys after the query, as in an
            encoder.
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, config: EncoderDecoderConfig, init: Init, *, bidirectional: bool) -> None:
        self.config = config
        self.bidirectional = bidirectional
        self.position = init.maybe("position")
        self.relative_bias = init.maybe("relative_bias")
        kind = config.norm
        eps = config.norm_eps
        self.embedding_norm = (
            Norm(kind, init.scope("embedding_norm"), eps) if config.embedding_norm else None
        )
        self.norm = Norm(kind, init.scope("norm"), eps)

    def first(
        self, table: nnx.Param, tokens_BT: jax.Array, start: jax.Array | None = None
    ) -> jax.Array:
        """Embed tokens. Return the residual stream before the first block, [B, T, D].

        Learned positions are added if the model has them. The sum is normalized if the config sets
        `embedding_norm`.

        Args:
            table: Token embeddings [V, D].
            tokens_BT: Token ids, int32 [B, T].
            start: Position of the first token, int32 []. The default is 0. With fewer than
                `start` + T learned positions, wrong ones are added without an error.
        """
        table_VD = table[...].astype(self.config.compute.dtype)
        h_BTD = self.layout.lookup(table_VD, tokens_BT, ("vocab", "embed"))
        if self.position is not None:
            positions_SD = self.position[...]
            length = tokens_BT.shape[1]
            if start is None:
                position_TD = positions_SD[:length]
            else:
                # `start` is traced in cached decoding, where an ordinary slice cannot use it.
                position_TD = jax.lax.dynamic_slice_in_dim(positions_SD, start, length)
            h_BTD = h_BTD + position_TD.astype(h_BTD.dtype)
        if self.embedding_norm is not None:
            h_BTD = self.embedding_norm(h_BTD)
        return self.layout.constrain(h_BTD, ("batch", "sequence", None))

    def bias(self, queries: int, keys: int, start: jax.Array | int = 0) -> jax.Array | None:
        """Return the relative position bias of attention logits, float32 [H, T, S].

        The result is `None` for a model without relative positions.

        Args:
            queries: Number of queries T. Their positions begin at `start`.
            keys: Number of keys S. Their positions begin at 0.
            start: Position of the first query, by default 0.
        """
        if self.relative_bias is None:
            return None
        bucket_TS = buckets(
            queries,
            keys,
            count=self.config.distance_buckets,
            longest=self.config.longest_distance,
            bidirectional=self.bidirectional,
            start=start,
        )
        # Logits are float32 whatever the type of activations, and so is their bias.
        table_KH = self.relative_bias[...].astype(jnp.float32)
        return jnp.moveaxis(table_KH[bucket_TS], -1, 0)


class Encoder(StackInputOutput):
    """Encoder stack, whose output the decoder attends to."""

    def __init__(self, config: EncoderDecoderConfig, init: Init) -> None:
        super().__init__(config, init, bidirectional=True)
        self.token = init.maybe("token")
        self.block = EncoderBlock(config, init.scope("block"))


class EncoderDecoder(StackInputOutput):
    """Encoder-decoder from tokens [B, S] and [B, T] to float32 logits [B, T, V].

    The logits at position t depend on all encoder inputs and on decoder inputs 0 to t.
    """

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
        """Return logits, float32 [B, T, V].

        Args:
            inputs: Tokens of the encoder, int32 [B, S].
            input_mask: Mask of the encoder's tokens, int32 [B, S], 0 at padding.
            decoder_inputs: Targets shifted right, int32 [B, T].
        """
        readout_inputs = self.readout_inputs(inputs, input_mask, decoder_inputs)
        return readout_inputs.logits(self.layout)

    def readout_inputs(
        self,
        inputs: jax.Array,
        input_mask: jax.Array,
        decoder_inputs: jax.Array,
        *,
        measure_logits: bool = False,
    ) -> ReadoutInputs:
        """Run the model up to its readout.

        Return the final hidden states and the readout matrix, so that a loss can form logits in
        chunks.

        Args:
            inputs: Tokens of the encoder, int32 [B, S].
            input_mask: Mask of the encoder's tokens, int32 [B, S], 0 at padding.
            decoder_inputs: Targets shifted right, int32 [B, T].
            measure_logits: `True` fills the result's `attention_logits`.
        """
        if measure_logits:
            return self._measured_readout_inputs(inputs, input_mask, decoder_inputs)
        h_BTD, context = self.begin(inputs, input_mask, decoder_inputs)
        h_BTD = residual_stack(
            self.block, h_BTD, self.config.depth, self.config.compute, *context, layout=self.layout
        )
        return self._readout_inputs(h_BTD)

    def _measured_readout_inputs(
        self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array
    ) -> ReadoutInputs:
        """Return the result of `readout_inputs` with the largest attention logits."""
        compute = self.config.compute
        encoder = self.encoder
        h_BSD, encoder_context = self._begin_encoder(inputs, input_mask)
        h_BSD, encoder_statistics = measured_stack(
            encoder.block,
            h_BSD,
            self.config.encoder_blocks,
            compute,
            *encoder_context,
            layout=self.layout,
        )
        context = self._decoder_context(encoder.norm(h_BSD), input_mask, decoder_inputs)
        h_BTD, statistics = measured_stack(
            self.block,
            self.embed(decoder_inputs),
            self.config.depth,
            compute,
            *context,
            layout=self.layout,
        )
        encoder_logits = named_logits("encoder.block", encoder_statistics) or {}
        decoder_logits = named_logits("block", statistics) or {}
        readout_inputs = self._readout_inputs(h_BTD)
        return readout_inputs._replace(attention_logits={**encoder_logits, **decoder_logits})

    def begin(
        self, inputs: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Run the encoder and embed the decoder inputs.

        Args:
            inputs: Tokens of the encoder, int32 [B, S].
            input_mask: Mask of the encoder's tokens, int32 [B, S], 0 at padding.
            decoder_inputs: Targets shifted right, int32 [B, T].

        Returns:
            The decoder's residual stream before its first block, [B, T, D], and the other arguments
            of every decoder block: encoder output, mask and bias.
        """
        memory_BSD = self.encode(inputs, input_mask)
        context = self._decoder_context(memory_BSD, input_mask, decoder_inputs)
        return self.embed(decoder_inputs), context

    def _decoder_context(
        self, memory_BSD: jax.Array, input_mask: jax.Array, decoder_inputs: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return the arguments of every decoder block after the stream.

        These are the encoder output, its padding mask, and the bias of relative positions or
        `None`.
        """
        length = decoder_inputs.shape[1]
        return memory_BSD, input_mask > 0, self.bias(length, length)

    def embed(self, tokens_BT: jax.Array, start: jax.Array | None = None) -> jax.Array:
        """Return the decoder's residual stream before its first block, [B, T, D].

        Args:
            tokens_BT: Tokens of the decoder, int32 [B, T].
            start: Position of the first token, int32 []. The default is 0.
        """
        return self.first(self.token, tokens_BT, start)

    def encode(self, inputs: jax.Array, input_mask: jax.Array) -> jax.Array:
        """Return the encoder output [B, S, D]: the residual stream after the final norm.

        Args:
            inputs: Tokens of the encoder, int32 [B, S].
            input_mask: Mask of the encoder's tokens, int32 [B, S], 0 at padding.
        """
        encoder = self.encoder
        h_BSD, context = self._begin_encoder(inputs, input_mask)
        h_BSD = residual_stack(
            encoder.block,
            h_BSD,
            self.config.encoder_blocks,
            self.config.compute,
            *context,
            layout=self.layout,
        )
        return encoder.norm(h_BSD)

    def _begin_encoder(
        self, inputs: jax.Array, input_mask: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        """Embed the encoder's inputs.

        Return the stream before the first block, and the other arguments of every encoder block:
        mask and bias.
        """
        encoder = self.encoder
        # The encoder has no table if `config.shared` is set. It then uses the table of the decoder.
        table = self.token if encoder.token is None else encoder.token
        h_BSD = encoder.first(table, inputs)
        length = inputs.shape[1]
        return h_BSD, (input_mask > 0, encoder.bias(length, length))

    def remember(self, inputs: jax.Array, input_mask: jax.Array) -> EncoderOutput:
        """Run the encoder, and compute from its output each decoder layer's cross-attention inputs.

        These are keys and values, which stay the same while an answer is decoded token by token.

        Args:
            inputs: Tokens of the encoder, int32 [B, S].
            input_mask: Mask of the encoder's tokens, int32 [B, S], 0 at padding.
        """
        memory_BSD = self.encode(inputs, input_mask)
        graph, stacked_state = nnx.split(self.block)

        def layer_keys(state: Any) -> tuple[jax.Array, jax.Array]:
            return nnx.merge(graph, state).cross.keys(memory_BSD)

        keys, values = jax.lax.map(layer_keys, stacked_state)
        return EncoderOutput(keys, values, input_mask > 0)

    def cached(
        self, tokens_BT: jax.Array, cache: Cache, memory: EncoderOutput
    ) -> tuple[jax.Array, Cache]:
        """Run all decoder blocks, without the readout, on the tokens that follow the cached ones.

        Args:
            tokens_BT: Next tokens, int32. The cache must have T free positions.
            cache: Keys and values of earlier tokens (`mupax.zoo.layers.cache.empty` has none).
            memory: Encoder output, from `remember`.

        Returns:
            The residual stream after the last block, [B, T, D], and the cache with the new tokens.
        """
        graph, stacked_state = nnx.split(self.block)
        h_BTD = self.embed(tokens_BT, cache.length)
        length = tokens_BT.shape[1]
        cache_size = cache.keys.shape[3]
        bias_HTS = self.bias(length, cache_size, cache.length)

        def run_layer(
            carry: tuple[jax.Array, Cache], layer_inputs: tuple[Any, ...]
        ) -> tuple[tuple[jax.Array, Cache], None]:
            h_BTD, cache = carry
            layer, state, keys, values = layer_inputs
            block = nnx.merge(graph, state)
            carry = block.cached(h_BTD, cache, layer, (keys, values), memory.mask, bias_HTS)
            return carry, None

        # The cross-attention keys and values have a leading axis of layers, so the scan slices them
        # like the parameters.
        layers = jnp.arange(self.config.depth)
        stacked_inputs = (layers, stacked_state, memory.keys, memory.values)
        (h_BTD, cache), _ = jax.lax.scan(run_layer, (h_BTD, cache), stacked_inputs)
        return h_BTD, cache._replace(length=cache.length + length)

    def read(self, h_BTD: jax.Array) -> jax.Array:
        """Return logits, float32 [B, T, V], from the residual stream after the last block."""
        return self._readout_inputs(h_BTD).logits(self.layout)

    def _readout_inputs(self, h_BTD: jax.Array) -> ReadoutInputs:
        features_BTD = self.norm(h_BTD)
        if self.readout is not None:
            return ReadoutInputs(features_BTD, self.readout[...])
        assert self.tied_readout is not None
        return ReadoutInputs(features_BTD, self.token[...].T, scale=self.tied_readout[...])
