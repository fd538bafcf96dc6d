"""Vision transformer (Dosovitskiy et al. 2021), pre-norm.

Shapes: B batch, H height, W width and C channels of an image, G patches on a side, S pixels on a
side of a patch, P patches, I numbers of a patch, T positions, D width of the model, K pixels of a
kernel, O output channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.layers.linear import Norm, ReadoutInputs, biased, project
from mupax.zoo.layers.stack import NO_STATISTICS, Block, BlockStatistics, named_logits, run_stack
from mupax.zoo.partition import ONE_DEVICE, Layout
from mupax.zoo.vit.config import Convolution, ViTConfig


class ViT(nnx.Module):
    """Image classifier: images [B, H, W, C] to float32 logits [B, classes]."""

    layout: Layout = ONE_DEVICE

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = Init(config, rngs)
        # Patches are made by one matrix, or by the convolutions of a stem.
        self.patch = init.maybe("patch")
        self.patch_bias = init.maybe("patch_bias")
        self.stem = None if config.stem is None else Stem(config, init.scope("stem"))
        self.cls = init.maybe("cls")
        self.position = init.maybe("position")
        self.block = Block(config, init.scope("block"))
        self.norm = Norm(config.norm, init.scope("norm"), config.norm_eps)
        self.pre_logits = init.maybe("pre_logits")
        self.pre_logits_bias = init.maybe("pre_logits_bias")
        self.readout = init.param("readout")
        self.readout_bias = init.maybe("readout_bias")

    def embed(self, images_BHWC: jax.Array) -> jax.Array:
        """Embed images with positions. Return the first residual stream, [B, T, D].

        Positions are the CLS token, registers and patches, in this order.
        """
        batch = len(images_BHWC)
        h_BTD = self._patches(images_BHWC)
        if self.config.registers is not None:
            # Registers are zeros here. Their position embeddings are all they have.
            h_BTD = jnp.pad(h_BTD, ((0, 0), (self.config.registers, 0), (0, 0)))
        if self.cls is not None:
            cls_D = self.cls[...].astype(h_BTD.dtype)
            cls_B1D = jnp.broadcast_to(cls_D, (batch, 1, h_BTD.shape[-1]))
            h_BTD = jnp.concatenate([cls_B1D, h_BTD], axis=1)
        if self.position is None:
            # Imported here, because few models have fixed positions.
            from mupax.zoo.vit.sines import sines

            position_TD = jnp.asarray(sines(self.config))
        else:
            position_TD = self.position[...]
        h_BTD = h_BTD + position_TD.astype(h_BTD.dtype)
        return self.layout.constrain(h_BTD, ("batch", "sequence", None))

    def _patches(self, images_BHWC: jax.Array) -> jax.Array:
        """Return the embeddings of all patches without positions, [B, P, D]."""
        batch, size, _, channels = images_BHWC.shape
        if self.stem is not None:
            return self.stem(images_BHWC).reshape(batch, -1, self.config.width)
        assert self.patch is not None
        patch = self.config.patch_size
        grid = size // patch
        x_BGSGSC = images_BHWC.reshape(batch, grid, patch, grid, patch, channels)
        x_BGGSSC = x_BGSGSC.swapaxes(2, 3)
        x_BPI = x_BGGSSC.reshape(batch, grid * grid, patch * patch * channels)
        x_BPI = x_BPI.astype(self.config.compute.dtype)
        h_BPD = project(x_BPI, self.patch[...], layout=self.layout)
        return biased(h_BPD, self.patch_bias)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        return self.readout_inputs(images_BHWC).logits(self.layout)

    def readout_inputs(
        self,
        images_BHWC: jax.Array,
        scales: jax.Array | None = None,
        *,
        measure_logits: bool = False,
    ) -> ReadoutInputs:
        """Run the model up to its readout. Return the features and the readout matrix.

        Args:
            images_BHWC: Images of the size and channels in the config.
            scales: Factor on each branch's output for drop path, float32 [B, layers, 2]. 1 by
                default.
            measure_logits: `True` fills the result's `attention_logits`.
        """
        h_BTD, statistics = run_stack(
            self.block,
            self.embed(images_BHWC),
            self.config.depth,
            self.config.compute,
            scale_BL2=scales,
            measure_logits=measure_logits,
            layout=self.layout,
        )
        return self._readout_inputs(h_BTD, statistics)

    def read(self, h_BTD: jax.Array) -> jax.Array:
        """Apply the final norm, pooling and the readout. Return float32 logits [B, classes].

        Args:
            h_BTD: Residual stream after all blocks, [B, T, D].
        """
        return self._readout_inputs(h_BTD).logits(self.layout)

    def _readout_inputs(
        self, h_BTD: jax.Array, statistics: BlockStatistics = NO_STATISTICS
    ) -> ReadoutInputs:
        """Normalize and pool the residual stream, and return the features with the readout.

        The layer before the readout (`pre_logits`) is applied to the features if there is one.
        """
        features_BD = self._pooled(self.norm(h_BTD))
        if self.pre_logits is not None:
            weight = self.pre_logits[...]
            # With the pool "cls-mean", the features have two vectors. Their axis and the axis of
            # entries are merged into one.
            weight_DD = weight.reshape(-1, weight.shape[-1])
            y_BD = project(features_BD, weight_DD, layout=self.layout)
            features_BD = jnp.tanh(biased(y_BD, self.pre_logits_bias))
        bias = None if self.readout_bias is None else self.readout_bias[...]
        readout = self.readout[...]
        readout_DC = readout.reshape(-1, readout.shape[-1])
        return ReadoutInputs(
            features_BD,
            readout_DC,
            bias=bias,
            routing=statistics.routing,
            attention_logits=named_logits("block", statistics),
        )

    def _pooled(self, h_BTD: jax.Array) -> jax.Array:
        """Return the input of the classifier, [B, D], or [B, 2 D] for "cls-mean"."""
        first_patch = self.config.leading
        if self.config.pool == "cls":
            return h_BTD[:, 0]
        patches_BPD = h_BTD[:, first_patch:] if first_patch else h_BTD
        mean_BD = jnp.mean(patches_BPD, axis=1)
        if self.config.pool == "mean":
            return mean_BD
        # The two vectors are interleaved, so that devices that split features have both values of a
        # feature.
        vectors_BD2 = jnp.stack([h_BTD[:, 0], mean_BD], axis=-1)
        return vectors_BD2.reshape(len(vectors_BD2), -1)


class Stem(nnx.Module):
    """Convolutions that make patches (Xiao et al. 2021), each followed by a norm and a GELU.

    With zero padding, a convolution's output has sides 1/stride of its input's. Norms are over
    channels.
    """

    def __init__(self, config: ViTConfig, init: Init) -> None:
        self.config = config
        self.first = init.param("first")
        self.second = init.param("second")
        self.third = init.maybe("third")
        self.first_norm = Norm(config.norm, init.scope("first_norm"), config.norm_eps, "gelu")
        self.second_norm = Norm(config.norm, init.scope("second_norm"), config.norm_eps, "gelu")
        # Assigned once: after `self.third_norm = None`, NNX would refuse to store a module there.
        third_norm = Norm(config.norm, init.scope("third_norm"), config.norm_eps, "gelu")
        self.third_norm = None if self.third is None else third_norm

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Return the patches, [B, H / patch_size, W / patch_size, D]."""
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
    """Convolve images with zero padding. Return [B, H / stride, W / stride, O].

    Args:
        x_BHWC: Images whose sides are multiples of the stride.
        weight: Kernel [K * C, O] or [K, C, O]. Its K pixels are in row-major order.
        convolution: Size and stride of the kernel, in pixels.
    """
    side = convolution.kernel
    weight_KKCO = weight.reshape(side, side, x_BHWC.shape[-1], weight.shape[-1])
    return jax.lax.conv_general_dilated(
        x_BHWC,
        weight_KKCO.astype(x_BHWC.dtype),
        window_strides=(convolution.stride, convolution.stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
