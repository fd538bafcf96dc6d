"""Small models of random weights under presets, and their logits and gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax import presets
from mupax.presets import VECTORS, Preset, Role
from mupax.train.core.factors import Factors, resolve
from mupax.train.reuse import plain
from mupax.train.reuse.transplant import ScaledModel
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import Definition, definition

SMALL_EPS = 1e-12
"""Epsilon of the norms. A wider stream and folded skips are then exact to rounding."""
SIZES: Any = {
    "width": 12,
    "depth": 2,
    "mlp_ratio": 1.5,
    "norm_eps": SMALL_EPS,
    "compute": ComputeConfig(layers="scan"),  # a loop compiles faster than its layers in a row
}
TEXT: Any = {**SIZES, "vocab_size": 17, "seq_len": 5, "norm": "rmsnorm"}
LM = DecoderConfig(
    **TEXT,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    positions="rotary",
    activation="swiglu",
    bias=False,
)
TIED = DecoderConfig(**TEXT, num_heads=3, tied=True)
VIT = ViTConfig(**SIZES, num_heads=3, image_size=6, patch_size=3, num_classes=5, pool="cls")
BASE = {"embed": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp": 12, "layers": 2}
PRESETS = {
    "sp": presets.get("sp"),
    "mup": presets.get("mup", base=BASE),
    "mean-field": presets.get("mup", base=BASE, form="mean-field"),
    "depth-mup": presets.get("depth-mup", base=BASE, gamma0=0.5, beta0=2.0),
    "completep": presets.get("completep"),
    "u-mup": presets.get("u-mup"),
}


def random_weights(built: Definition, factors: Factors, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random weights, so large that the model's products are of order one."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, leaf in built.abstract.items():
        spec = built.specs[name]
        std = 0.3
        if spec.role not in VECTORS:
            std = np.prod([built.sizes[axis] for axis in spec.fan_in]) ** -0.5
        mean = float(spec.role is Role.NORM_GAIN)
        value = mean + std * random.standard_normal(leaf.shape)
        multiplier = factors.multiplier[name].reshape(-1, *[1] * (value.ndim - 1))
        weights[name] = (value / multiplier).astype(np.float32).reshape(leaf.shape)
    return weights


def inputs_of(model: ModelConfig) -> jax.Array:
    """Return two random examples."""
    random = np.random.default_rng(1)
    if isinstance(model, ViTConfig):
        shape = (2, model.image_size, model.image_size, model.channels)
        return jnp.asarray(random.standard_normal(shape), jnp.float32)
    assert isinstance(model, DecoderConfig)
    return jnp.asarray(random.integers(model.vocab_size, size=(2, model.seq_len)), jnp.int32)


@functools.cache
def forward_program(model: ModelConfig) -> Any:
    """Compile a model once for all presets."""
    return jax.jit(definition(model).apply)


@functools.cache
def gradient_program(model: ModelConfig) -> Any:
    """Compile the gradient of the mean of the logits times a goal."""
    apply = definition(model).apply

    def mean(params: Any, factors: Factors, goal: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.mean(goal * apply(params, factors.multiplier, factors.forward, inputs))

    return jax.jit(jax.grad(mean))


class Model(NamedTuple):
    """A model under a preset."""

    scaled: ScaledModel
    factors: Factors

    def random_weights(self, seed: int = 0) -> dict[str, np.ndarray]:
        return random_weights(self.scaled.definition, self.factors, seed)

    def logits(self, params: Any, inputs: jax.Array | None = None) -> np.ndarray:
        inputs = inputs_of(self.scaled.model) if inputs is None else inputs
        apply = forward_program(self.scaled.model)
        return np.asarray(apply(params, self.factors.multiplier, self.factors.forward, inputs))

    def gradients(self, params: Any) -> dict[str, np.ndarray]:
        """Return the gradients of the mean of logits times random numbers."""
        inputs = inputs_of(self.scaled.model)
        goal = np.random.default_rng(3).standard_normal(self.logits(params).shape)
        program = gradient_program(self.scaled.model)
        return jax.device_get(program(params, self.factors, jnp.asarray(goal), inputs))


def model_under(model: ModelConfig, preset: Preset) -> Model:
    """Return a model under a preset, with the factors of the preset's first optimizer."""
    built = definition(model)
    factors = resolve(preset, built, preset.optimizers[0])
    logits = plain.logits_of(built, factors)
    return Model(ScaledModel(model, built, plain.scales(built, factors), logits), factors)


def changed(model: Any, **fields: Any) -> Any:
    """Return a config with other fields."""
    return dataclasses.replace(model, **fields)
