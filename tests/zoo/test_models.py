"""The models against independent formulas: what a position may see, and that every way to run them is one function.

Every parameter and factor is drawn at random, biases and gains too: nothing hides behind a zero or a one. All tolerances
are for float32, relative to the largest entry: 2e-5 for one pass, 1e-4 for gradients, which sum over more.
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
from jax.extend.core import jaxprs_in_params

from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig
from mupax.zoo.definition import Arrays, define, definition
from mupax.zoo.layers.stack import REMAT, UNROLLED_DEPTH, runs_as_scan
from tests.zoo.models import (
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
    with_compute,
)

# What a position may see


def influence(model: ModelConfig, *, causal: bool = True) -> np.ndarray:
    """Largest |d logits[t] / d embedding[s]|, as [t, s]."""
    assert isinstance(model, DecoderConfig)
    length = model.seq_len

    def make() -> nnx.Module:
        module = model.module(nnx.Rngs(0))
        module.block.attention.causal = causal
        return module

    model_definition = define(make, sizes=model.sizes())
    params, factors = numbers(model_definition)
    # What is added at position s, alone: learned positions, or the table's row s under the tokens 0, 1, 2, ...
    table = "position" if model.positions == "learned" else "token"
    assert table == "position" or not model.tied

    def projected(rows: jax.Array) -> jax.Array:
        logits: Any = model_definition.bind({**params, table: rows}, factors)(
            jnp.arange(length)[None]
        )  # pyright: ignore[reportCallIssue]
        return logits[0] @ jnp.asarray(
            np.random.default_rng(3).standard_normal(model.vocab_size), jnp.float32
        )

    jacobian = jax.jit(jax.jacrev(projected))(params[table])
    return np.abs(np.asarray(jacobian)).max(axis=-1)[:, :length]


@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "layers", "attention"),
    [
        (DECODER, "scan", "auto"),
        (DECODER, "unrolled", "xla"),
        (MODERN, "unrolled", "auto"),
        (MODERN, "scan", "xla"),
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
    assert (influence(model, causal=False) > 1e-5).all()


def test_a_shorter_text_is_a_prefix_of_a_longer_one() -> None:
    for model in (DECODER, MODERN):
        model_definition = definition(model)
        params, factors = numbers(model_definition)
        tokens = inputs_of(model)
        whole, part = (
            logits_of(model_definition, params, factors, t) for t in (tokens, tokens[:, :5])
        )
        assert_close(part, whole[:, :5], FORWARD)


# One function, however it runs


@every_model
def test_scan_equals_unrolled(model: ModelConfig) -> None:
    scanned, unrolled = (
        logits_and_gradients(with_compute(model, layers=layers)) for layers in ("scan", "unrolled")
    )
    assert_close(unrolled, scanned, GRADIENT)


@pytest.mark.core
@pytest.mark.parametrize("layers", ["scan", "unrolled"])
@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_recomputation_changes_nothing(remat: str, layers: str) -> None:
    plain = logits_and_gradients(with_compute(MODERN, layers=layers))
    assert_close(
        logits_and_gradients(with_compute(MODERN, layers=layers, remat=remat)), plain, GRADIENT
    )


def test_layers_that_see_differently_are_one_loop_over_groups() -> None:
    rest = with_compute(GEMMA, layers="scan", remat="block")  # a group of two, and a third layer
    assert_close(
        logits_and_gradients(rest),
        logits_and_gradients(with_compute(GEMMA, layers="scan")),
        GRADIENT,
    )
    counts = primitives(with_compute(GEMMA, layers="scan"))
    assert counts["scan"] == primitives(with_compute(MODERN, layers="scan"))["scan"]
    model_definition = definition(GEMMA)
    own, params = (
        logits_of(model_definition, *numbers(model_definition), inputs_of(GEMMA)),
        numbers(model_definition),
    )
    for change in (
        {"full_every": None},
        {"window_theta": None},
        {"attention_softcap": None},
        {"logit_softcap": None},
    ):
        other = logits_of(
            definition(dataclasses.replace(GEMMA, **change)), *params, inputs_of(GEMMA)
        )
        assert np.abs(other - own).max() > 1e-3, change


@pytest.mark.parametrize("model", [MODERN, VIT], ids=model_id)
def test_fused_projections_change_nothing(model: ModelConfig) -> None:
    separate, fused = (with_compute(model, projections=name) for name in ("separate", "fused"))
    assert_close(logits_and_gradients(fused), logits_and_gradients(separate), GRADIENT)
    # One product for three, and for a gated MLP one for two, forward and twice backward.
    saved = 4 if isinstance(model, DecoderConfig) else 2
    counts = [
        primitives(dataclasses.replace(m, compute=dataclasses.replace(m.compute, layers="scan")))
        for m in (separate, fused)
    ]
    assert counts[0]["product"] - counts[1]["product"] >= saved
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
    model_definition = definition(with_compute(MODERN, layers="unrolled"))
    params, factors = numbers(model_definition)
    tokens = inputs_of(MODERN)
    plain: Any = model_definition.bind(params, factors)(tokens)  # pyright: ignore[reportCallIssue]
    assert_close(plain, logits_of(model_definition, params, factors, tokens), FORWARD)


@pytest.mark.parametrize("model", [MODERN, VIT], ids=model_id)
def test_attention_implementations_agree_inside_a_model(model: ModelConfig) -> None:
    merged, xla = (
        logits_and_gradients(with_compute(model, attention=name)) for name in ("auto", "xla")
    )
    assert_close(xla, merged, GRADIENT)


def primitives(model: ModelConfig) -> dict[str, int]:
    """How often each primitive stands in the traced gradient; a product says whether it has batch dimensions."""
    model_definition = definition(model)
    params, factors = numbers(model_definition)

    def loss(params: Arrays) -> jax.Array:
        return jnp.sum(model_definition.bind(params, factors)(inputs_of(model)))  # pyright: ignore[reportCallIssue]

    counts: dict[str, int] = {}

    def count(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "dot_general":
                name = (
                    "batched product" if equation.params["dimension_numbers"][1][0] else "product"
                )
            counts[name] = counts.get(name, 0) + 1
            for inner in jaxprs_in_params(equation.params):
                count(inner)

    count(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    return counts


def test_scan_and_recomputation_are_what_runs() -> None:
    # The equalities above would also hold if the options did nothing.
    plain, dots, block = (
        primitives(with_compute(DECODER, layers="scan", remat=remat))
        for remat in ("none", "dots", "block")
    )
    unrolled = primitives(with_compute(DECODER, layers="unrolled"))
    assert "scan" in plain
    assert "scan" not in unrolled
    assert unrolled["product"] > 1.5 * plain["product"]
    assert plain["product"] == dots["product"] < block["product"]
    assert plain["batched product"] < dots["batched product"]
    assert plain["tanh"] < dots["tanh"] == block["tanh"]


# Precision


def test_bfloat16_products_stay_near_float32() -> None:
    half, whole = (
        logits_and_gradients(with_compute(MODERN, dtype=dtype)) for dtype in ("bfloat16", "float32")
    )
    # bfloat16 keeps 8 bits: 2^-8 = 0.4 % a rounding, and errors of three blocks add up.
    assert_close(half[0], whole[0], 0.05)
    assert np.abs(half[0] - whole[0]).max() > 1e-4, "nothing ran in bfloat16"
    chex.assert_trees_all_equal_dtypes(half[1], whole[1])


def test_parameters_are_stored_as_asked() -> None:
    model_definition = definition(
        dataclasses.replace(DECODER, compute=ComputeConfig(param_dtype="bfloat16"))
    )
    assert {leaf.dtype for leaf in model_definition.abstract.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in definition(DECODER).abstract.values()} == {
        jnp.dtype(jnp.float32)
    }
