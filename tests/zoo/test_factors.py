"""What a preset's factors do inside a model: skip and branch of each block, and the scale of attention logits.

All tolerances are for float32, relative to the largest entry.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import Arrays, Definition, definition
from mupax.zoo.layers.stack import residual_stack

FORWARD = 2e-5


DECODER = DecoderConfig(
    width=11, depth=2, num_heads=6, num_kv_heads=2, head_dim=4, mlp_ratio=13 / 11, vocab_size=17, seq_len=7
)


VIT = ViTConfig(width=10, depth=2, num_heads=5, mlp_ratio=1.3, image_size=9, patch_size=3, channels=2, num_classes=7)


def with_compute(model: ModelConfig, **changes: str) -> ModelConfig:
    return dataclasses.replace(model, compute=dataclasses.replace(model.compute, **changes))


def numbers(found: Definition, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Random parameters of about fan-in size and random factors, different in every layer."""
    random = np.random.default_rng(seed)

    def draw(name: str) -> jax.Array:
        spec, shape = found.specs[name], found.abstract[name].shape
        size = np.prod([found.sizes[axis] for axis in spec.fan_in]) ** -0.5
        start = 1.0 if spec.role.value == "norm_gain" else 0.0
        return jnp.asarray(start + size * 0.7 * random.standard_normal(shape), jnp.float32)

    factors = {n: jnp.asarray(random.uniform(0.3, 0.9, f["shape"]), jnp.float32) for n, f in found.factors.items()}
    return {name: draw(name) for name in found.specs}, factors


def inputs_of(model: ModelConfig, batch: int = 2) -> jax.Array:
    random = np.random.default_rng(1)
    if isinstance(model, DecoderConfig):
        return jnp.asarray(random.integers(model.vocab_size, size=(batch, model.seq_len)), jnp.int32)
    return jnp.asarray(random.standard_normal((batch, model.image_size, model.image_size, model.channels)), jnp.float32)


def logits_of(found: Definition, params: Arrays, factors: Arrays, x: jax.Array) -> jax.Array:
    return jax.jit(lambda params, factors, x: found.bind(params, factors)(x))(params, factors, x)  # pyright: ignore[reportCallIssue]


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Every leaf within tolerance of the largest entry of its counterpart."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-6))


@pytest.mark.core
@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_factors_multiply_skip_and_branch_of_each_block(layers: str) -> None:
    model = with_compute(DECODER, layers=layers)
    found = definition(model)
    params, factors = numbers(found)
    h = jnp.asarray(np.random.default_rng(8).standard_normal((2, 7, model.width)), jnp.float32)

    @jax.jit
    def stack(skip: jax.Array, branch: jax.Array) -> jax.Array:
        bound: Any = found.bind(params, {**factors, "block.skip": skip, "block.branch": branch})
        return residual_stack(bound.block, h, model.depth, model.compute)

    def through(skip: np.ndarray, branch: np.ndarray) -> np.ndarray:
        return np.asarray(stack(skip.astype(np.float32), branch.astype(np.float32)))

    skips = np.array([[2.0, 3.0], [5.0, 7.0]])
    np.testing.assert_allclose(through(skips, np.zeros((2, 2))), np.prod(skips) * h, rtol=1e-5)
    # A branch opened in the last block alone adds that branch, linear in its factor, biases too.
    for branch in range(2):
        opened = np.zeros((2, 2))
        opened[1, branch] = 1.0
        half, whole = (through(np.ones((2, 2)), size * opened) - h for size in (0.5, 1.0))
        assert np.abs(whole).max() > 1e-2
        assert_close(2 * half, whole, 1e-4)


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_a_skip_that_is_not_given_is_one(layers: str) -> None:
    found = definition(with_compute(DECODER, layers=layers))
    params, factors = numbers(found)
    ones = {**factors, "block.skip": jnp.ones((2, 2))}
    left_out = {name: value for name, value in factors.items() if name != "block.skip"}
    tokens = inputs_of(DECODER)
    assert_close(logits_of(found, params, left_out, tokens), logits_of(found, params, ones, tokens), FORWARD)
    assert np.abs(logits_of(found, params, factors, tokens) - logits_of(found, params, ones, tokens)).max() > 1e-2


def test_a_logit_factor_of_zero_is_uniform_attention() -> None:
    found = definition(VIT)
    params, factors = numbers(found)
    x = jnp.asarray(np.random.default_rng(9).standard_normal((2, 9, VIT.width)), jnp.float32)

    @jax.jit
    def first_layer(scale: jax.Array) -> jax.Array:
        bound: Any = found.bind(params, {**factors, "block.attention.logit_scale": scale})
        graph, state = nnx.split(bound.block.attention)
        layer: Any = nnx.merge(graph, jax.tree.map(lambda array: array[0], state))
        return layer(x)

    # With uniform weights every position gets the same; the second layer's factor is not the first one's.
    off, on = (np.asarray(first_layer(jnp.array(scale))) for scale in ([0.0, 1.0], [1.0, 0.0]))
    assert_close(off, np.broadcast_to(off[:, :1], off.shape), FORWARD)
    assert np.ptp(on, axis=1).max() > 1e-2
