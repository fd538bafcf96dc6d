"""Vision transformer (Dosovitskiy et al. 2021), pre-norm. B batch, P patches in rows of G, T positions, D width, C classes or channels.

I numbers of a patch, S its side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.layers.block import Block
from mupax.zoo.layers.linear import Norm, Reading, biased, project
from mupax.zoo.layers.stack import routed_stack
from mupax.zoo.partition import ONE_DEVICE, Layout
from mupax.zoo.vit.config import ViTConfig

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing
    from mupax.zoo.vit.stem import Stem


def _stem(config: ViTConfig, init: Init) -> Stem | None:
    """Return the convolutions that make patches; None where one matrix does."""
    if config.stem is None:
        return None
    from mupax.zoo.vit.stem import Stem  # few models have one

    return Stem(config, init.scope("stem"))


class ViT(nnx.Module):
    """Images [B, image_size, image_size, channels] to float32 logits [B, num_classes]."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = Init(config, rngs)
        self.patch = init.maybe("patch")
        self.patch_bias = init.maybe("patch_bias")
        self.stem = _stem(config, init)
        self.cls, self.position = init.maybe("cls"), init.maybe("position")
        self.block = Block(config, init.scope("block"))
        self.norm = Norm(config.norm, init.scope("norm"), config.norm_eps)
        self.pre_logits, self.pre_logits_bias = init.maybe("pre_logits"), init.maybe("pre_logits_bias")
        self.readout, self.readout_bias = init.param("readout"), init.maybe("readout_bias")

    def embed(self, images_BHWC: jax.Array) -> jax.Array:
        batch = len(images_BHWC)
        h_BTD = self._patches(images_BHWC)
        if self.config.registers is not None:
            h_BTD = jnp.pad(h_BTD, ((0, 0), (self.config.registers, 0), (0, 0)))
        if self.cls is not None:
            cls_B1D = jnp.broadcast_to(self.cls[...].astype(h_BTD.dtype), (batch, 1, h_BTD.shape[-1]))
            h_BTD = jnp.concatenate([cls_B1D, h_BTD], axis=1)
        if self.position is None:
            from mupax.zoo.vit.sines import sines  # a table that few models have

            position_TD = jnp.asarray(sines(self.config))
        else:
            position_TD = self.position[...]
        return self.layout.constrain(h_BTD + position_TD.astype(h_BTD.dtype), ("batch", "sequence", None))

    def _patches(self, images_BHWC: jax.Array) -> jax.Array:
        """Return what the stream has of every patch, [B, P, D]."""
        batch, size, _, channels = images_BHWC.shape
        if self.stem is not None:
            return self.stem(images_BHWC).reshape(batch, -1, self.config.width)
        assert self.patch is not None
        grid = size // self.config.patch_size
        patch = self.config.patch_size
        x_BGGSSC = images_BHWC.reshape(batch, grid, patch, grid, patch, channels).swapaxes(2, 3)
        x_BPI = x_BGGSSC.reshape(batch, grid * grid, patch * patch * channels).astype(self.config.compute.dtype)
        h_BPD = project(x_BPI, self.patch[...], layout=self.layout)
        return biased(h_BPD, self.patch_bias)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        return self.reading(images_BHWC).logits(self.layout)

    def reading(self, images_BHWC: jax.Array, scales: jax.Array | None = None) -> Reading:
        """What the readout is taken of.

        Args:
            images_BHWC: images.
            scales: what every branch is taken times, float32 [B, layers, 2]; all of them once unless given.
        """
        h_BTD, routing = routed_stack(
            self.block,
            self.embed(images_BHWC),
            self.config.depth,
            self.config.compute,
            scale_BL2=scales,
            layout=self.layout,
        )
        return self._reading(h_BTD, routing)

    def read(self, h_BTD: jax.Array) -> jax.Array:
        return self._reading(h_BTD).logits(self.layout)

    def _reading(self, h_BTD: jax.Array, routing: Routing | None = None) -> Reading:
        features_BD, weight = self._pooled(self.norm(h_BTD)), self.readout[...]
        if self.pre_logits is not None:
            w = self.pre_logits[...]
            y_BD = project(features_BD, w.reshape(-1, w.shape[-1]), layout=self.layout)
            y_BD = biased(y_BD, self.pre_logits_bias)
            features_BD = jnp.tanh(y_BD)
        bias = None if self.readout_bias is None else self.readout_bias[...]
        return Reading(features_BD, weight.reshape(-1, weight.shape[-1]), bias=bias, routing=routing)

    def _pooled(self, h_BTD: jax.Array) -> jax.Array:
        """What the classifier reads, [B, D], or [B, 2 D] of both vectors."""
        first = self.config.leading
        if self.config.pool == "cls":
            return h_BTD[:, 0]
        mean_BD = jnp.mean(h_BTD[:, first:] if first else h_BTD, axis=1)
        if self.config.pool == "mean":
            return mean_BD
        # Both vectors of a feature are neighbours: where devices split features, each has both.
        vectors_BD2 = jnp.stack([h_BTD[:, 0], mean_BD], axis=-1)
        return vectors_BD2.reshape(len(vectors_BD2), -1)
