"""Parts of the models against independent formulas: the vision transformer's patches, attention, readout and QK-norm.

Every parameter and factor is drawn at random (`tests/zoo/models.py`), and all tolerances are as in test_models.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import definition
from tests.zoo.models import (
    BARE,
    CLS,
    DECODER,
    FORWARD,
    MODERN,
    TIED,
    VIT,
    assert_close,
    every_model,
    inputs_of,
    logits_and_gradients,
    logits_of,
    model_id,
    numbers,
    with_compute,
)

# The vision transformer


@pytest.mark.core
@every_model
def test_logits_are_float32_of_the_expected_shape(model: ModelConfig) -> None:
    model_definition = definition(with_compute(model, dtype="bfloat16"))
    out = jax.eval_shape(
        lambda p, f, x: model_definition.bind(p, f)(x),  # pyright: ignore
        *numbers(model_definition),
        inputs_of(model, 5),
    )
    expected = (5, 7, 17) if isinstance(model, DecoderConfig) else (5, 7)
    assert out == jax.ShapeDtypeStruct(expected, jnp.float32)


@pytest.mark.parametrize("model", [VIT, CLS], ids=model_id)
def test_patches_are_a_strided_convolution(model: ViTConfig) -> None:
    model_definition = definition(model)
    params, factors = numbers(model_definition)
    images = inputs_of(model)
    bound: Any = model_definition.bind(params, factors)
    kernel = params["patch"].reshape(
        model.patch_size, model.patch_size, model.channels, model.width
    )
    patches = jax.lax.conv_general_dilated(
        images, kernel, (model.patch_size,) * 2, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    rows = patches.reshape(len(images), model.num_patches, model.width) + params["patch_bias"]
    if model.pool != "mean":
        leading_RD = jnp.concatenate([params["cls"][None], jnp.zeros((2, model.width))])
        rows = jnp.concatenate(
            [jnp.broadcast_to(leading_RD, (len(images), *leading_RD.shape)), rows], axis=1
        )
    assert_close(bound.embed(images), rows + params["position"], FORWARD)


@pytest.mark.parametrize("model", [VIT, CLS], ids=model_id)
def test_the_order_of_patches_is_known_by_their_positions_alone(model: ViTConfig) -> None:
    model_definition = definition(model)
    params, factors = numbers(model_definition)
    images = inputs_of(model)
    grid, size, first = model.image_size // model.patch_size, model.patch_size, model.leading
    order = (4 * np.arange(model.num_patches) + 2) % model.num_patches  # every patch moves
    cells = (
        images.reshape(-1, grid, size, grid, size, model.channels)
        .swapaxes(2, 3)
        .reshape(-1, grid**2, size, size, model.channels)
    )
    shuffled = (
        cells[:, order]
        .reshape(-1, grid, grid, size, size, model.channels)
        .swapaxes(2, 3)
        .reshape(images.shape)
    )
    moved = params["position"].at[first:].set(params["position"][first:][order])
    run = functools.partial(logits_of, model_definition)
    same, other = (
        run({**params, "position": moved}, factors, shuffled),
        run(params, factors, shuffled),
    )
    assert_close(same, run(params, factors, images), FORWARD)
    assert np.abs(other - run(params, factors, images)).max() > 1e-2


def test_a_vit_sees_every_patch_from_everywhere() -> None:
    model_definition = definition(CLS)
    params, factors = numbers(model_definition)
    pixels = jax.jit(jax.grad(lambda x: jnp.sum(model_definition.bind(params, factors)(x)[:, 0])))(
        inputs_of(CLS)
    )  # pyright: ignore
    assert (np.abs(pixels) > 0).all()


# Attention


def test_grouped_queries_are_repeated_keys_and_values() -> None:
    grouped = dataclasses.replace(DECODER, qk_norm=False)
    whole = dataclasses.replace(grouped, num_kv_heads=grouped.num_heads)
    model_definition, wide = definition(grouped), definition(whole)
    params, factors = numbers(model_definition)
    repeats = grouped.num_heads // grouped.kv_heads

    def repeated(name: str) -> jax.Array:
        axes = model_definition.specs[name].axes
        return (
            jnp.repeat(params[name], repeats, axis=axes.index("kv_heads"))
            if "kv_heads" in axes
            else params[name]
        )

    tokens = inputs_of(grouped)
    few = logits_of(model_definition, params, factors, tokens)
    many = logits_of(wide, {name: repeated(name) for name in params}, factors, tokens)
    assert (
        model_definition.abstract["block.attention.key"].shape
        != wide.abstract["block.attention.key"].shape
    )
    assert_close(few, many, FORWARD)


def test_a_key_bias_exists_only_where_it_has_a_gradient() -> None:
    assert "block.attention.key_bias" not in definition(DECODER).specs
    assert "block.attention.key_bias" not in definition(VIT).specs
    for model in (MODERN, TIED, CLS):
        _, gradients = logits_and_gradients(model)
        sizes = {
            name: np.abs(gradients[f"block.attention.{name}"]).max()
            for name in ("key_bias", "query_bias")
        }
        assert sizes["key_bias"] > 0.1 * sizes["query_bias"] > 0


# Readout and QK-norm


def test_a_tied_readout_is_the_embedding_times_its_factor() -> None:
    untied = dataclasses.replace(TIED, tied=False)
    model_definition, free = definition(TIED), definition(untied)
    params, factors = numbers(model_definition)
    tokens = inputs_of(TIED)
    assert "readout" not in model_definition.specs
    tied = logits_of(model_definition, params, factors, tokens)
    own = {**params, "readout": factors["tied_readout"] * params["token"].T}
    untied_factors = {name: value for name, value in factors.items() if name != "tied_readout"}
    assert_close(tied, logits_of(free, own, untied_factors, tokens), FORWARD)


@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_forgets_the_length_of_queries_and_keys(normed: bool) -> None:
    model = dataclasses.replace(BARE, qk_norm=normed, norm_gain=True)
    model_definition = definition(model)
    params, factors = numbers(model_definition)
    grown = {
        name: value * (3.0 if name.endswith(("query", "key")) else 1.0)
        for name, value in params.items()
    }
    before, after = (
        logits_of(model_definition, p, factors, inputs_of(model)) for p in (params, grown)
    )
    change = np.abs(after - before).max() / np.abs(before).max()
    # The norm's epsilon of 1e-5, beside squares of about 0.5, is what is left.
    assert change < 1e-4 if normed else change > 1e-2
