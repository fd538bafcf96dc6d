"""Blocks of an encoder-decoder: self-attention that hides padding or adds relative positions, and attention to the encoder.

B batch, T query and S key positions, D width, H heads, K key heads, N head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.layers.block import MLP, Attention
from mupax.zoo.layers.linear import Norm, biased, project
from mupax.zoo.layers.masked import attend
from mupax.zoo.partition import ONE_DEVICE, Layout

if TYPE_CHECKING:
    from mupax.zoo.layers.cache import Cache


class SelfAttention(Attention):
    """Attention within one sequence; the encoder's looks both ways."""

    def __init__(self, config: EncoderDecoderConfig, init: Init, *, causal: bool) -> None:
        super().__init__(config, init)
        self.causal = causal

    def __call__(self, x_BTD: jax.Array, mask_BS: jax.Array | None, bias_HTS: jax.Array | None) -> jax.Array:
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

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array, mask_BS: jax.Array | None) -> jax.Array:
        """The branch [B, T, D].

        Args:
            x_BTD: the decoder's stream after its norm.
            memory_BSD: the encoder's output.
            mask_BS: bool, False at its padding.
        """
        return self.among(x_BTD, self.keys(memory_BSD), mask_BS)

    def among(self, x_BTD: jax.Array, keys: tuple[jax.Array, jax.Array], mask_BS: jax.Array | None) -> jax.Array:
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
            project(memory_BSD, w[...], kind=self.kind, layout=self.layout) for w in (self.key, self.value)
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

    def __call__(self, h_BSD: jax.Array, mask_BS: jax.Array | None, bias_HSS: jax.Array | None) -> jax.Array:
        h_BSD = self.added(h_BSD, 0, self.attention(self.attention_norm(h_BSD), mask_BS, bias_HSS))
        h_BSD = self.added(h_BSD, 1, self.mlp(self.mlp_norm(h_BSD)))
        return self.layout.constrain(h_BSD, ("batch", "sequence", None))

    def added(self, h_BTD: jax.Array, branch: int, y_BTD: jax.Array) -> jax.Array:
        """The stream after a branch. Branch scales are applied here only.

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
        self.cross_norm = Norm(config.norm, init.scope("cross_norm"), config.norm_eps, config.branch_activation)
        self.cross = CrossAttention(config, init.scope("cross"))

    def __call__(
        self, h_BTD: jax.Array, memory_BSD: jax.Array, mask_BS: jax.Array | None, bias_HTT: jax.Array | None
    ) -> jax.Array:
        """The stream after the block, [B, T, D].

        Args:
            h_BTD: before it.
            memory_BSD: the encoder's output.
            mask_BS: bool, False at its padding.
            bias_HTT: of the decoder's relative positions.
        """
        h_BTD = self.added(h_BTD, 0, self.attention(self.attention_norm(h_BTD), None, bias_HTT))
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
        return self._read_on(self.added(h_BTD, 0, y_BTD), keys, mask_BS), cache

    def _read_on(self, h_BTD: jax.Array, keys: tuple[jax.Array, jax.Array], mask_BS: jax.Array | None) -> jax.Array:
        h_BTD = self.added(h_BTD, 1, self.cross.among(self.cross_norm(h_BTD), keys, mask_BS))
        h_BTD = self.added(h_BTD, 2, self.mlp(self.mlp_norm(h_BTD)))
        return self.layout.constrain(h_BTD, ("batch", "sequence", None))
