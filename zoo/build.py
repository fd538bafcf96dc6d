"""From a config to its model."""

from __future__ import annotations

from flax import nnx

from zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from zoo.decoder import Decoder
from zoo.definition import Definition, define
from zoo.vit import ViT


def build(config: ModelConfig, rngs: nnx.Rngs) -> ViT | Decoder:
    """The model of a config, its parameters at fan-in initialization."""
    match config:
        case ViTConfig():
            return ViT(config, rngs)
        case DecoderConfig():
            return Decoder(config, rngs)


def definition(config: ModelConfig) -> Definition:
    """The model of a config without its numbers; nothing is allocated."""
    return define(lambda: build(config, nnx.Rngs(0)), sizes=config.sizes())
