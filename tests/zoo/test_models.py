"""The models against independent formulas: what a position may see, and one function in every way.

Every parameter and factor is drawn at random, so that nothing hides behind a zero or a one.
Tolerances are for float32, relative to the largest entry: 2e-5 for one pass, 1e-4 for gradients,
which sum over more.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig
from mupax.zoo.definition import Arrays, define, definition
from mupax.zoo.layers.stack import REMAT, UNROLLED_DEPTH, runs_as_scan
from tests.fixtures.tiny import equations
from tests.zoo.models import (
    BARE,
    CLS,
    DECODER,
    FORWARD,
    GEMMA,
    GRADIENT,
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
    random_logits,
    with_compute,
)

# What a position may see


def influence(model: ModelConfig, *, causal: bool = True) -> np.ndarray:
    """Return the largest |d logits[t] / d embedding[s]|, as [t, s]."""
    assert isinstance(model, DecoderConfig)
    length = model.seq_len

    def make() -> nnx.Module:
        module = model.module(nnx.Rngs(0))
        module.block.attention.causal = causal
        return module

    model_definition = define(make, sizes=model.sizes())
    params, factors = numbers(model_definition)
    # An array that is added at position s alone: learned positions, or the table's row s under the
    # tokens 0, 1, 2, ...
    table = "position" if model.positions == "learned" else "token"
    assert table == "position" or not model.tied
    direction = np.random.default_rng(3).standard_normal(model.vocab_size).astype(np.float32)

    def projected(rows: jax.Array) -> jax.Array:
        network: Any = model_definition.bind({**params, table: rows}, factors)
        return network(jnp.arange(length)[None])[0] @ direction

    jacobian = jax.jit(jax.jacrev(projected))(params[table])
    return np.abs(np.asarray(jacobian)).max(axis=-1)[:, :length]


@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "layers", "attention"),
    [
        (DECODER, "unrolled", "xla"),
        (MODERN, "scan", "auto"),
        (TIED, "scan", "auto"),
    ],
)
def test_no_position_depends_on_a_later_one(
    model: ModelConfig, layers: str, attention: str
) -> None:
    magnitudes = influence(with_compute(model, layers=layers, attention=attention))
    past = np.tri(*magnitudes.shape, dtype=bool)
    assert (magnitudes[~past] == 0).all()
    assert (magnitudes[past] > 1e-5).all()


@pytest.mark.core
@pytest.mark.parametrize("model", [DECODER, MODERN], ids=model_id)
def test_control_attention_to_the_future_shows_in_the_gradient(model: ModelConfig) -> None:
    assert (influence(with_compute(model, layers="scan"), causal=False) > 1e-5).all()


@pytest.mark.parametrize("model", [DECODER, MODERN], ids=model_id)
def test_a_shorter_text_is_a_prefix_of_a_longer_one(model: ModelConfig) -> None:
    scan = with_compute(model, layers="scan")
    expected = random_logits(scan)[:, :5]
    model_definition = definition(scan)
    prefix = inputs_of(model)[:, :5]
    assert_close(logits_of(model_definition, *numbers(model_definition), prefix), expected, FORWARD)


# One function, however it runs


@every_model
def test_scan_equals_unrolled(model: ModelConfig) -> None:
    scan = with_compute(model, layers="scan")
    unrolled = with_compute(model, layers="unrolled")
    # Gradients of one model of each kind of stack: the others differ outside of the loop.
    if model in (MODERN, GEMMA, CLS):
        assert_close(logits_and_gradients(unrolled), logits_and_gradients(scan), GRADIENT)
    else:
        assert_close(random_logits(unrolled), random_logits(scan), FORWARD)


@pytest.mark.core
@pytest.mark.parametrize(
    ("remat", "layers"),
    [
        *((remat, "scan") for remat in REMAT if remat != "none"),
        ("block", "unrolled"),
        ("offload", "unrolled"),
    ],
)
def test_recomputation_changes_nothing(remat: str, layers: str) -> None:
    plain = logits_and_gradients(with_compute(MODERN, layers=layers))
    recomputed = logits_and_gradients(with_compute(MODERN, layers=layers, remat=remat))
    assert_close(recomputed, plain, GRADIENT)


def test_layers_that_see_differently_are_one_loop_over_groups() -> None:
    scan = with_compute(GEMMA, layers="scan")
    recomputed = with_compute(GEMMA, layers="scan", remat="block")  # a group of two, and a third
    assert_close(logits_and_gradients(recomputed), logits_and_gradients(scan), GRADIENT)
    modern = with_compute(MODERN, layers="scan")
    assert primitives(scan)["scan"] == primitives(modern)["scan"]


@pytest.mark.parametrize(
    "change",
    [
        {"full_every": None},
        {"window_theta": None},
        {"attention_softcap": None},
        {"logit_softcap": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_option_of_such_layers_changes_the_logits(change: dict[str, None]) -> None:
    scan = with_compute(GEMMA, layers="scan")
    params, factors = numbers(definition(scan))
    changed = definition(dataclasses.replace(scan, **change))  # pyright: ignore[reportArgumentType]
    logits = logits_of(changed, params, factors, inputs_of(GEMMA))
    assert np.abs(logits - logits_and_gradients(scan)[0]).max() > 1e-3


@pytest.mark.parametrize("model", [MODERN, VIT], ids=model_id)
def test_fused_projections_and_attention_by_xla_change_nothing(model: ModelConfig) -> None:
    separate = with_compute(model, layers="scan")
    fused = with_compute(separate, projections="fused")
    other = with_compute(fused, attention="xla")
    assert_close(logits_and_gradients(other), logits_and_gradients(separate), GRADIENT)
    # One product for three, and for a gated MLP one for two, forward and twice backward.
    saved = 4 if isinstance(model, DecoderConfig) else 2
    assert primitives(separate)["product"] - primitives(fused)["product"] >= saved
    assert definition(fused).specs == definition(separate).specs


@pytest.mark.core
def test_auto_unrolls_on_cpu_alone() -> None:
    class Device:
        platform = "tpu"

    compute = ComputeConfig()
    assert not runs_as_scan(compute, UNROLLED_DEPTH)
    assert runs_as_scan(compute, UNROLLED_DEPTH + 1)
    tpu: Any = Device()
    assert runs_as_scan(compute, 2, layout=tpu)
    assert not runs_as_scan(dataclasses.replace(compute, layers="unrolled"), 2, layout=tpu)


@pytest.mark.core
def test_jit_equals_no_jit() -> None:
    model = with_compute(BARE, layers="unrolled")
    model_definition = definition(model)
    network: Any = model_definition.bind(*numbers(model_definition))
    assert_close(network(inputs_of(model)), random_logits(model), FORWARD)


def primitives(model: ModelConfig) -> Counter[str]:
    """Count the primitives of the traced gradient. A product says if it has batch dimensions."""
    model_definition = definition(model)
    params, factors = numbers(model_definition)

    def loss(params: Arrays) -> jax.Array:
        network: Any = model_definition.bind(params, factors)
        return jnp.sum(network(inputs_of(model)))

    counts: Counter[str] = Counter()
    for equation in equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr):
        name = equation.primitive.name
        if name == "dot_general":
            batched = equation.params["dimension_numbers"][1][0]
            name = "batched product" if batched else "product"
        counts[name] += 1
    return counts


def test_scan_and_recomputation_are_what_runs() -> None:
    # The equalities above would also hold if the options did nothing.
    plain = primitives(with_compute(DECODER, layers="scan", remat="none"))
    dots = primitives(with_compute(DECODER, layers="scan", remat="dots"))
    block = primitives(with_compute(DECODER, layers="scan", remat="block"))
    unrolled = primitives(with_compute(DECODER, layers="unrolled"))
    assert "scan" in plain
    assert "scan" not in unrolled
    assert unrolled["product"] > 1.5 * plain["product"]
    assert plain["product"] == dots["product"] < block["product"]
    assert plain["batched product"] < dots["batched product"]
    assert plain["tanh"] < dots["tanh"] == block["tanh"]


# Precision


def test_bfloat16_products_stay_near_float32() -> None:
    scan = with_compute(MODERN, layers="scan")
    logits, gradients = logits_and_gradients(scan)
    half_logits, half_gradients = logits_and_gradients(with_compute(scan, dtype="bfloat16"))
    # bfloat16 keeps 8 bits: 2^-8 = 0.4 % a rounding, and errors of three blocks add up.
    assert_close(half_logits, logits, 0.05)
    assert np.abs(half_logits - logits).max() > 1e-4, "nothing ran in bfloat16"
    chex.assert_trees_all_equal_dtypes(half_gradients, gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_stored_as_asked(dtype: Any) -> None:
    model = dataclasses.replace(DECODER, compute=ComputeConfig(param_dtype=dtype))
    leaves = definition(model).abstract.values()
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    assert DECODER.compute.param_dtype == "float32"
