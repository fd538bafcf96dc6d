"""Small models of every kind with random parameters and factors, their logits and gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import Arrays, Definition, definition
from mupax.zoo.layers.stack import runs_as_scan
from tests.fixtures import tiny

FORWARD, GRADIENT = 2e-5, 1e-4

DECODER = DecoderConfig(
    width=11,
    depth=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_ratio=13 / 11,
    vocab_size=17,
    seq_len=7,
)
MODERN = dataclasses.replace(
    DECODER, positions="rotary", norm="rmsnorm", activation="swiglu", qk_norm=True
)
GEMMA = dataclasses.replace(
    MODERN,
    depth=3,
    bias=False,
    qk_norm=False,
    window=3,
    window_theta=9.0,
    full_every=2,
    post_norm=True,
    attention_softcap=0.5,
    logit_softcap=2.0,
)
TIED = dataclasses.replace(DECODER, tied=True, qk_norm=True)
BARE = dataclasses.replace(DECODER, bias=False, norm_gain=False, activation="relu")
VIT = ViTConfig(
    width=10,
    depth=2,
    num_heads=5,
    mlp_ratio=1.3,
    image_size=9,
    patch_size=3,
    channels=2,
    num_classes=7,
)
CLS = dataclasses.replace(
    VIT, pool="cls-mean", registers=2, layer_scale=0.5, qk_norm=True, pre_logits=True
)
VARIANTS: dict[str, ModelConfig] = {
    "decoder": DECODER,
    "modern": MODERN,
    "gemma": GEMMA,
    "tied": TIED,
    "bare": BARE,
    "vit": VIT,
    "cls": CLS,
}


def model_id(model: ModelConfig) -> str:
    return next(name for name, config in VARIANTS.items() if config == model)


every_model = pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)


def with_compute(model: ModelConfig, **changes: str) -> ModelConfig:
    return dataclasses.replace(model, compute=dataclasses.replace(model.compute, **changes))


def numbers(model_definition: Definition, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Draw parameters of about fan-in size and factors, different in every layer."""
    random = np.random.default_rng(seed)

    def draw(name: str) -> jax.Array:
        spec, shape = model_definition.specs[name], model_definition.abstract[name].shape
        size = np.prod([model_definition.sizes[axis] for axis in spec.fan_in]) ** -0.5
        start = 1.0 if spec.role.value == "norm_gain" else 0.0
        return jnp.asarray(start + size * 0.7 * random.standard_normal(shape), jnp.float32)

    factors = {
        n: jnp.asarray(random.uniform(0.3, 0.9, f["shape"]), jnp.float32)
        for n, f in model_definition.factors.items()
    }
    return {name: draw(name) for name in model_definition.specs}, factors


def inputs_of(model: ModelConfig, batch: int = 2) -> jax.Array:
    random = np.random.default_rng(1)
    config: Any = model
    if isinstance(model, DecoderConfig):
        return jnp.asarray(
            random.integers(model.vocab_size, size=(batch, model.seq_len)), jnp.int32
        )
    return jnp.asarray(
        random.standard_normal((batch, config.image_size, config.image_size, config.channels)),
        jnp.float32,
    )


def logits_of(
    model_definition: Definition, params: Arrays, factors: Arrays, x: jax.Array
) -> jax.Array:
    def run(params: Arrays, factors: Arrays, x: jax.Array) -> jax.Array:
        network: Any = model_definition.bind(params, factors)
        return network(x)

    return jax.jit(run)(params, factors, x)


@functools.cache
def random_logits(model: ModelConfig) -> jax.Array:
    """Return the logits of a model with the `numbers` of its definition."""
    model_definition = definition(model)
    return logits_of(model_definition, *numbers(model_definition), inputs_of(model))


def logits_and_gradients(model: ModelConfig) -> Any:
    """Return logits of random parameters, and the gradient of a random linear function of them."""
    return _logits_and_gradients(
        with_compute(model, layers="scan" if runs_as_scan(model.compute, 2) else "unrolled")
    )


@functools.cache
def _logits_and_gradients(model: ModelConfig) -> Any:
    model_definition = definition(model)
    params, factors = numbers(model_definition)
    x = inputs_of(model)

    def loss(params: Arrays) -> tuple[jax.Array, jax.Array]:
        network: Any = model_definition.bind(params, factors)
        logits = network(x)
        weights = np.random.default_rng(2).standard_normal(logits.shape).astype(np.float32)
        return jnp.sum(weights * logits), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, gradients


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Assert that every array is within `tolerance` of its largest expected entry."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    tiny.assert_close(actual, expected, tolerance)
