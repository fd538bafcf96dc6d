"""Vision transformer (Dosovitskiy et al. 2021), pre-norm. B batch, P patches in rows of G, T positions, D width, C classes or channels.

I numbers of a patch, S its side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.layers.linear import Norm, ReadoutInputs, biased, project
from mupax.zoo.layers.stack import Block, run_stack
from mupax.zoo.partition import ONE_DEVICE, Layout
from mupax.zoo.vit.config import Convolution, ViTConfig

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing


class ViT(nnx.Module):
    """Images [B, image_size, image_size, channels] to float32 logits [B, num_classes]."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = Init(config, rngs)
        self.patch = init.maybe("patch")
        self.patch_bias = init.maybe("patch_bias")
        # Convolutions make the patches of some models, one matrix those of the others.
        self.stem = None if config.stem is None else Stem(config, init.scope("stem"))
        self.cls, self.position = init.maybe("cls"), init.maybe("position")
        self.block = Block(config, init.scope("block"))
        self.norm = Norm(config.norm, init.scope("norm"), config.norm_eps)
        self.pre_logits, self.pre_logits_bias = (
            init.maybe("pre_logits"),
            init.maybe("pre_logits_bias"),
        )
        self.readout, self.readout_bias = init.param("readout"), init.maybe("readout_bias")

    def embed(self, images_BHWC: jax.Array) -> jax.Array:
        batch = len(images_BHWC)
        h_BTD = self._patches(images_BHWC)
        if self.config.registers is not None:
            h_BTD = jnp.pad(h_BTD, ((0, 0), (self.config.registers, 0), (0, 0)))
        if self.cls is not None:
            cls_B1D = jnp.broadcast_to(
                self.cls[...].astype(h_BTD.dtype), (batch, 1, h_BTD.shape[-1])
            )
            h_BTD = jnp.concatenate([cls_B1D, h_BTD], axis=1)
        if self.position is None:
            from mupax.zoo.vit.sines import sines  # a table that few models have

            position_TD = jnp.asarray(sines(self.config))
        else:
            position_TD = self.position[...]
        return self.layout.constrain(
            h_BTD + position_TD.astype(h_BTD.dtype), ("batch", "sequence", None)
        )

    def _patches(self, images_BHWC: jax.Array) -> jax.Array:
        """Return what the stream has of every patch, [B, P, D]."""
        batch, size, _, channels = images_BHWC.shape
        if self.stem is not None:
            return self.stem(images_BHWC).reshape(batch, -1, self.config.width)
        assert self.patch is not None
        grid = size // self.config.patch_size
        patch = self.config.patch_size
        x_BGGSSC = images_BHWC.reshape(batch, grid, patch, grid, patch, channels).swapaxes(2, 3)
        x_BPI = x_BGGSSC.reshape(batch, grid * grid, patch * patch * channels).astype(
            self.config.compute.dtype
        )
        h_BPD = project(x_BPI, self.patch[...], layout=self.layout)
        return biased(h_BPD, self.patch_bias)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        return self.readout_inputs(images_BHWC).logits(self.layout)

    def readout_inputs(
        self, images_BHWC: jax.Array, scales: jax.Array | None = None
    ) -> ReadoutInputs:
        """Return the features and the readout that logits are made of.

        Args:
            images_BHWC: images.
            scales: what every branch is taken times, float32 [B, layers, 2]; all of them once unless given.
        """
        h_BTD, routing = run_stack(
            self.block,
            self.embed(images_BHWC),
            self.config.depth,
            self.config.compute,
            scale_BL2=scales,
            layout=self.layout,
        )
        return self._readout_inputs(h_BTD, routing)

    def read(self, h_BTD: jax.Array) -> jax.Array:
        return self._readout_inputs(h_BTD).logits(self.layout)

    def _readout_inputs(self, h_BTD: jax.Array, routing: Routing | None = None) -> ReadoutInputs:
        features_BD, weight = self._pooled(self.norm(h_BTD)), self.readout[...]
        if self.pre_logits is not None:
            w = self.pre_logits[...]
            y_BD = project(features_BD, w.reshape(-1, w.shape[-1]), layout=self.layout)
            y_BD = biased(y_BD, self.pre_logits_bias)
            features_BD = jnp.tanh(y_BD)
        bias = None if self.readout_bias is None else self.readout_bias[...]
        return ReadoutInputs(
            features_BD, weight.reshape(-1, weight.shape[-1]), bias=bias, routing=routing
        )

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


# Convolutions that make patches of an image (Xiao et al. 2021). H height, W width, C channels, K a kernel's pixels, O channels out.


class Stem(nnx.Module):
    """Convolutions with a norm over channels and a GELU after each; a padded border keeps sides multiples of the strides."""

    def __init__(self, config: ViTConfig, init: Init) -> None:
        self.config = config
        self.first = init.param("first")
        self.second = init.param("second")
        self.third = init.maybe("third")
        self.first_norm = Norm(config.norm, init.scope("first_norm"), config.norm_eps, "gelu")
        self.second_norm = Norm(config.norm, init.scope("second_norm"), config.norm_eps, "gelu")
        third_norm = Norm(config.norm, init.scope("third_norm"), config.norm_eps, "gelu")
        self.third_norm = None if self.third is None else third_norm

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Return the patches, [B, H / patch_size, W / patch_size, width]."""
        x_BHWC = images_BHWC.astype(self.config.compute.dtype)
        layers = (
            (self.first, self.first_norm),
            (self.second, self.second_norm),
            (self.third, self.third_norm),
        )
        for convolution, (weight, norm) in zip(self.config.convolutions, layers, strict=False):
            assert weight is not None
            assert norm is not None
            x_BHWC = norm(convolve(x_BHWC, weight[...], convolution))
        return x_BHWC


def convolve(x_BHWC: jax.Array, weight: jax.Array, convolution: Convolution) -> jax.Array:
    """Return the convolution, [B, H / stride, W / stride, channels that it writes].

    Args:
        x_BHWC: sides are multiples of the stride.
        weight: [K * C, channels], or [K, C, channels], with the kernel's rows first.
        convolution: says kernel and stride.
    """
    kernel = convolution.kernel
    weight_KKCO = weight.reshape(kernel, kernel, x_BHWC.shape[-1], weight.shape[-1]).astype(
        x_BHWC.dtype
    )
    strides = (convolution.stride, convolution.stride)
    return jax.lax.conv_general_dilated(
        x_BHWC, weight_KKCO, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
