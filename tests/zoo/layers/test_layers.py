"""The parts of the models against their formulas: attention, rotary positions, norms, products, MLPs.

All tolerances are for float32, relative to the largest entry: 2e-5 for one pass, 1e-4 for gradients, which sum over more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.train.config.run import MeshConfig
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import Init
from mupax.zoo.families import ConfigError
from mupax.zoo.layers import linear
from mupax.zoo.layers.kernels import attend, merged_attention
from mupax.zoo.layers.linear import Norm, _turned, project, rotary, scaled_frequencies
from mupax.zoo.transformer import RopeScaling
from tests.zoo.models import DECODER, FORWARD, GRADIENT, assert_close


def projections(
    heads: int, kv_heads: int, *, batch: int = 3, length: int = 7, size: int = 5
) -> list[jax.Array]:
    random = np.random.default_rng(5)
    shapes = [(batch, length, n, size) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def reference_attention(q: Any, k: Any, v: Any, *, causal: bool) -> np.ndarray:
    """Loops over batch, heads and queries, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        kv, last = h // (q.shape[2] // k.shape[2]), t + 1 if causal else k.shape[1]
        logits = k[b, :last, kv] @ q[b, t, h]
        weights = np.exp(logits - logits.max())
        out[b, t, h] = weights / weights.sum() @ v[b, :last, kv]
    return out


@pytest.mark.core
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_attention_equals_its_definition(
    implementation: Any, heads: int, kv_heads: int, causal: bool
) -> None:
    q, k, v = projections(heads, kv_heads)
    actual = attend(q, k, v, causal=causal, implementation=implementation)
    np.testing.assert_allclose(
        actual, reference_attention(q, k, v, causal=causal), rtol=0, atol=FORWARD
    )


@pytest.mark.parametrize("causal", [True, False])
def test_attention_implementations_have_one_gradient(causal: bool) -> None:
    q, k, v = projections(6, 2)
    weights = jnp.asarray(np.random.default_rng(6).standard_normal(q.shape), jnp.float32)

    def gradients(run: Callable[..., jax.Array]) -> Any:
        return jax.jit(jax.grad(lambda *qkv: jnp.sum(weights * run(*qkv)), argnums=(0, 1, 2)))(
            q, k, v
        )

    merged = gradients(lambda *qkv: merged_attention(*qkv, causal=causal))
    assert_close(
        gradients(lambda *qkv: attend(*qkv, causal=causal, implementation="xla")), merged, GRADIENT
    )


@pytest.mark.parametrize(("rotate", "share"), [(False, False), (True, True)])
def test_why_a_key_bias_is_left_out(rotate: bool, share: bool) -> None:
    # A bias on every key shifts a query's logits by one number, which softmax ignores; rotation makes it depend on the key.
    q, k, v = projections(3, 3, size=4)
    weights = jnp.asarray(np.random.default_rng(6).standard_normal(q.shape), jnp.float32)

    def loss(bias: jax.Array) -> jax.Array:
        queries, keys = (rotary(x, 100.0) for x in (q, k + bias)) if rotate else (q, k + bias)
        return jnp.sum(weights * merged_attention(queries, keys, v, causal=True))

    at_keys = jax.jit(
        jax.grad(lambda k: jnp.sum(weights * merged_attention(q, k, v, causal=True)))
    )(k)
    gradient = jax.jit(jax.grad(loss))(jnp.full((3, 4), 0.1))
    assert (np.abs(gradient).max() > 1e-2 * np.abs(at_keys).max()) == share
    if not share:
        assert np.abs(gradient).max() < 1e-5 * np.abs(at_keys).max()


# Rotary positions


def test_rotary_is_multiplication_by_a_phase() -> None:
    (x, _, _), theta = projections(3, 3, size=6), 50.0
    half = np.asarray(x[..., :3]) + 1j * np.asarray(x[..., 3:])
    angle = np.arange(7)[:, None, None] * theta ** (-np.arange(3) / 3)
    turned = half * np.exp(1j * angle)
    np.testing.assert_allclose(
        rotary(x, theta), np.concatenate([turned.real, turned.imag], axis=-1), atol=FORWARD
    )


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_scaled_frequencies_are_those_of_the_reference(kind: Literal["llama3", "linear"]) -> None:
    def apply_scaling(frequency: float) -> float:
        """Scale a frequency as Meta's reference code of Llama 3.1 does."""
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original / scaling.high:
            return frequency
        if wavelength > scaling.original / scaling.low:
            return frequency / scaling.factor
        smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency

    scaling, frequency = RopeScaling(kind, 8.0, 1.0, 4.0, 8192), 500_000.0 ** -(np.arange(64) / 64)
    expected = [apply_scaling(each) if kind == "llama3" else each / 8 for each in frequency]
    actual = scaled_frequencies(jnp.asarray(frequency, jnp.float32), scaling)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)
    if kind == "llama3":
        assert (
            len({each < 0.99 * plain for each, plain in zip(expected, frequency, strict=True)}) == 2
        )  # some are left alone
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 128)), jnp.float32)
    half = np.asarray(x[..., :64]) + 1j * np.asarray(x[..., 64:])
    turned = half * np.exp(1j * np.arange(3)[:, None, None] * np.asarray(expected))
    by_hand = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotary(x, 500_000.0, scaling=scaling), by_hand, atol=1e-5)


def test_a_part_of_each_head_is_turned() -> None:
    (x, _, _) = projections(3, 3, size=6)
    y = rotary(x, 50.0, size=4)
    np.testing.assert_array_equal(y[..., :4], rotary(x[..., :4], 50.0))
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])


def test_rotary_logits_depend_on_distance_alone() -> None:
    random = np.random.default_rng(7)
    q, k = (
        jnp.broadcast_to(jnp.asarray(random.standard_normal(6), jnp.float32), (1, 11, 1, 6))
        for _ in range(2)
    )
    logits = np.einsum("btn,bsn->ts", *(np.asarray(rotary(x, 50.0))[:, :, 0] for x in (q, k)))
    for distance in range(-10, 11):
        diagonal = np.diagonal(logits, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(logits[0]) > 0.1


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_by_a_product_is_the_same_numbers(dtype: str) -> None:
    # The way of TPUs, by operations that round as written: bit for bit forward and backward.
    x, weights, _ = (y.astype(dtype) for y in projections(3, 3, size=8))
    angle = jnp.arange(7.0)[None, :, None] * 50.0 ** (-jnp.arange(4.0) / 4)

    def run(way: Callable[[jax.Array], jax.Array]) -> Any:
        with jax.disable_jit():
            y, transpose = jax.vjp(way, x)
            return y, *transpose(weights)

    by_halves, by_product = (
        run(lambda x: rotary(x, 50.0)),
        run(lambda x: _turned(x, jnp.cos(angle), jnp.sin(angle))),
    )
    chex.assert_trees_all_equal(by_product, by_halves)
    (_, back), turn = by_product, lambda x: _turned(x, jnp.cos(angle), -jnp.sin(angle))
    chex.assert_trees_all_equal(back, turn(weights))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(back, _turned(weights, jnp.cos(angle), jnp.sin(angle)))


def test_rotary_takes_the_product_on_tpus() -> None:
    layout = MeshLayout(make_mesh(MeshConfig()))
    (x, _, _), products = projections(3, 3, size=8), {}
    for layout.platform in ("cpu", "tpu"):
        jaxpr = jax.make_jaxpr(lambda x: rotary(x, 50.0, layout=layout))(x)
        products[layout.platform] = "dot_general" in str(jaxpr)
    assert products == {"cpu": False, "tpu": True}


# Layers


def test_norms_equal_their_formulas() -> None:
    random = np.random.default_rng(10)
    x = (3 + 2 * random.standard_normal((3, 5, 7))).astype(np.float32)
    gain, bias = random.standard_normal((2, 7)).astype(np.float32)
    model = DecoderConfig(width=7, depth=1, num_heads=1, vocab_size=5, seq_len=3)
    layer = Norm("layernorm", Init(model, nnx.Rngs(0), "norm."), 1e-5)
    rms = Norm(
        "rmsnorm", Init(dataclasses.replace(model, norm="rmsnorm"), nnx.Rngs(0), "norm."), 1e-5
    )
    assert rms.bias is None
    assert layer.gain is not None
    assert layer.bias is not None
    assert rms.gain is not None
    layer.gain.set_value(jnp.asarray(gain))
    layer.bias.set_value(jnp.asarray(bias))
    rms.gain.set_value(jnp.asarray(gain))
    standard = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer(jnp.asarray(x)), standard * gain + bias, atol=FORWARD)
    np.testing.assert_allclose(
        rms(jnp.asarray(x)), x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain, atol=FORWARD
    )
    assert layer(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_products_sum_over_the_last_dimensions() -> None:
    random = np.random.default_rng(11)
    x, w = (
        random.standard_normal((2, 3, 5, 7)).astype(np.float32),
        random.standard_normal((5, 7, 11, 13)).astype(np.float32),
    )
    np.testing.assert_allclose(
        project(jnp.asarray(x), jnp.asarray(w), inputs=2),
        np.einsum("abij,ijkl->abkl", x, w),
        atol=1e-4,
    )
    half = project(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), inputs=2)
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_mlps_equal_their_formulas(activation: Any) -> None:
    config = dataclasses.replace(DECODER, activation=activation)
    graph, stacked = nnx.split(config.module(nnx.Rngs(0)).block.mlp)
    mlp = nnx.merge(graph, jax.tree.map(lambda array: array[0], stacked))
    random = np.random.default_rng(12)
    for _, variable in nnx.to_flat_state(nnx.state(mlp)):
        variable.set_value(jnp.asarray(random.standard_normal(variable.shape), jnp.float32))
    p = {
        path[0]: np.asarray(variable[...], np.float64)
        for path, variable in nnx.to_flat_state(nnx.state(mlp))
    }
    x = random.standard_normal((2, 3, config.width)).astype(np.float32)
    up = x @ p["up"] + p["up_bias"]
    if activation == "swiglu":
        gate = x @ p["gate"] + p["gate_bias"]
        hidden = gate / (1 + np.exp(-gate)) * up
    elif activation == "relu":
        hidden = np.maximum(up, 0)
    else:
        hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    expected = (hidden @ p["down"] + p["down_bias"]).astype(np.float32)
    assert_close(np.asarray(mlp(jnp.asarray(x))), expected, FORWARD)


# Products of 8 bits


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_products_of_8_bits_are_near_and_follow_every_factor(kind: str) -> None:
    pytest.importorskip("qwix", reason="products of 8 bits need the extra `quantized`")
    keys = jax.random.split(jax.random.key(0))
    x_BTI, w_IHN = jax.random.normal(keys[0], (2, 3, 17)), jax.random.normal(keys[1], (17, 5, 2))

    def of(x: jax.Array, w: jax.Array, kind: str | None) -> Any:
        y, back = jax.vjp(lambda x, w: project(x, w, kind=kind), x, w)
        return y, *back(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    exact, near = of(x_BTI, w_IHN, None), of(x_BTI, w_IHN, kind)
    for a, b in zip(exact, near, strict=True):
        error = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
        assert 1e-3 < error < {"int8": 0.03, "float8": 0.1}[kind]
    np.testing.assert_array_equal(of(4 * x_BTI, w_IHN / 64, kind)[0], near[0] / 16)


@pytest.mark.core
@pytest.mark.parametrize(
    ("capabilities", "refused"),
    [({"8.9", "9.0"}, False), ({"10.0"}, False), ({"gfx942"}, False), ({"9.0", "8.0"}, True)],
)
def test_float8_is_refused_on_gpus_that_have_none(
    capabilities: set[str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = MeshLayout(make_mesh(MeshConfig(), jax.devices()[:1]))
    layout.platform = "gpu"
    layout.capabilities = frozenset(capabilities)
    # The product itself needs an extra.
    monkeypatch.setattr(linear, "_quantized_product", lambda x, *_: x)
    x_TD = jnp.ones((2, 4))
    if refused:
        with pytest.raises(ConfigError, match=r"a GPU of the mesh has 8\.0; leave out"):
            project(x_TD, jnp.ones((4, 4)), kind="float8", layout=layout)
    else:
        assert project(x_TD, jnp.ones((4, 4)), kind="float8", layout=layout) is x_TD
