"""Convolutions that make patches of an image (Xiao et al. 2021). B batch, H height, W width, C channels, K a kernel's pixels."""

from __future__ import annotations

import jax
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.layers.linear import Norm
from mupax.zoo.vit.config import Convolution, ViTConfig


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
        layers = ((self.first, self.first_norm), (self.second, self.second_norm), (self.third, self.third_norm))
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
    weight_KKCO = weight.reshape(kernel, kernel, x_BHWC.shape[-1], weight.shape[-1]).astype(x_BHWC.dtype)
    strides = (convolution.stride, convolution.stride)
    return jax.lax.conv_general_dilated(
        x_BHWC, weight_KKCO, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
