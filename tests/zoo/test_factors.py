"""What a preset's factors do inside a model: skip and branch of each block, and the scale of attention logits.

All tolerances are for float32, relative to the largest entry.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.zoo.definition import definition
from mupax.zoo.layers.stack import residual_stack
from tests.zoo.models import (
    DECODER,
    FORWARD,
    VIT,
    assert_close,
    inputs_of,
    logits_of,
    numbers,
    with_compute,
)


@pytest.mark.core
@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_factors_multiply_skip_and_branch_of_each_block(layers: str) -> None:
    model = with_compute(DECODER, layers=layers)
    model_definition = definition(model)
    params, factors = numbers(model_definition)
    h = jnp.asarray(np.random.default_rng(8).standard_normal((2, 7, model.width)), jnp.float32)

    @jax.jit
    def stack(skip: jax.Array, branch: jax.Array) -> jax.Array:
        bound: Any = model_definition.bind(
            params, {**factors, "block.skip": skip, "block.branch": branch}
        )
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
    model_definition = definition(with_compute(DECODER, layers=layers))
    params, factors = numbers(model_definition)
    ones = {**factors, "block.skip": jnp.ones((2, 2))}
    left_out = {name: value for name, value in factors.items() if name != "block.skip"}
    tokens = inputs_of(DECODER)
    assert_close(
        logits_of(model_definition, params, left_out, tokens),
        logits_of(model_definition, params, ones, tokens),
        FORWARD,
    )
    assert (
        np.abs(
            logits_of(model_definition, params, factors, tokens)
            - logits_of(model_definition, params, ones, tokens)
        ).max()
        > 1e-2
    )


def test_a_logit_factor_of_zero_is_uniform_attention() -> None:
    model_definition = definition(VIT)
    params, factors = numbers(model_definition)
    x = jnp.asarray(np.random.default_rng(9).standard_normal((2, 9, VIT.width)), jnp.float32)

    @jax.jit
    def first_layer(scale: jax.Array) -> jax.Array:
        bound: Any = model_definition.bind(
            params, {**factors, "block.attention.logit_scale": scale}
        )
        graph, state = nnx.split(bound.block.attention)
        layer: Any = nnx.merge(graph, jax.tree.map(lambda array: array[0], state))
        return layer(x)

    # With uniform weights every position gets the same; the second layer's factor is not the first one's.
    off, on = (np.asarray(first_layer(jnp.array(scale))) for scale in ([0.0, 1.0], [1.0, 0.0]))
    assert_close(off, np.broadcast_to(off[:, :1], off.shape), FORWARD)
    assert np.ptp(on, axis=1).max() > 1e-2
