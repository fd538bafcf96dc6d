"""The models against independent formulas: what a position may see, and that every way to run them is one function.

Every parameter and factor is drawn at random, biases and gains too: nothing hides behind a zero or a one. All tolerances
are for float32, relative to the largest entry: 2e-5 for one pass, 1e-4 for gradients, which sum over more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from zoo.attend import attend, merged_attention
from zoo.block import REMAT, residual_stack
from zoo.build import build, definition
from zoo.configs import ComputeConfig, DecoderConfig, ModelConfig, ViTConfig
from zoo.definition import Arrays, Definition, define
from zoo.layers import Norm, project, rotary
from zoo.mlp import MLP
from zoo.param import Init

FORWARD, GRADIENT = 2e-5, 1e-4

DECODER = DecoderConfig(
    width=11, depth=2, num_heads=6, num_kv_heads=2, head_dim=4, mlp_ratio=13 / 11, vocab_size=17, seq_len=7
)
MODERN = dataclasses.replace(DECODER, positions="rotary", norm="rmsnorm", activation="swiglu", qk_norm=True)
TIED = dataclasses.replace(DECODER, tied=True, qk_norm=True)
BARE = dataclasses.replace(DECODER, bias=False, norm_gain=False, activation="relu")
VIT = ViTConfig(width=10, depth=2, num_heads=5, mlp_ratio=1.3, image_size=9, patch_size=3, channels=2, num_classes=7)
CLS = dataclasses.replace(VIT, pool="cls", qk_norm=True)
VARIANTS: dict[str, ModelConfig] = {
    "decoder": DECODER,
    "modern": MODERN,
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


@functools.cache
def logits_and_gradients(model: ModelConfig) -> Any:
    """Logits, and the gradient of a random linear function of them, of a model with the `numbers` of its definition."""
    found = definition(model)
    params, factors = numbers(found)
    x = inputs_of(model)

    def loss(params: Arrays) -> tuple[jax.Array, jax.Array]:
        logits: Any = found.bind(params, factors)(x)  # pyright: ignore[reportCallIssue]
        weights = jnp.asarray(np.random.default_rng(2).standard_normal(logits.shape), jnp.float32)
        return jnp.sum(weights * logits), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, gradients


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Every leaf within tolerance of the largest entry of its counterpart."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-6))


# What a position may see


def influence(model: ModelConfig, *, causal: bool = True) -> np.ndarray:
    """Largest |d logits[t] / d embedding[s]|, as [t, s]."""
    assert isinstance(model, DecoderConfig)
    length = model.seq_len

    def make() -> nnx.Module:
        made = build(model, nnx.Rngs(0))
        made.block.attention.causal = causal
        return made

    found = define(make, sizes=model.sizes())
    params, factors = numbers(found)
    # What is added at position s, alone: learned positions, or the table's row s under the tokens 0, 1, 2, ...
    table = "position" if model.positions == "learned" else "token"
    assert table == "position" or not model.tied

    def projected(rows: jax.Array) -> jax.Array:
        logits: Any = found.bind({**params, table: rows}, factors)(jnp.arange(length)[None])  # pyright: ignore[reportCallIssue]
        return logits[0] @ jnp.asarray(np.random.default_rng(3).standard_normal(model.vocab_size), jnp.float32)

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
def test_no_position_depends_on_a_later_one(model: ModelConfig, layers: str, attention: str) -> None:
    seen = influence(with_compute(model, layers=layers, attention=attention))
    past = np.tri(*seen.shape, dtype=bool)
    assert (seen[~past] == 0).all()
    assert (seen[past] > 1e-5).all()


@pytest.mark.core
@pytest.mark.parametrize("model", [DECODER, MODERN], ids=model_id)
def test_control_attention_to_the_future_shows_in_the_gradient(model: ModelConfig) -> None:
    assert (influence(model, causal=False) > 1e-5).all()


def test_a_shorter_text_is_a_prefix_of_a_longer_one() -> None:
    for model in (DECODER, MODERN):
        found = definition(model)
        params, factors = numbers(found)
        tokens = inputs_of(model)
        whole, part = (logits_of(found, params, factors, t) for t in (tokens, tokens[:, :5]))
        assert_close(part, whole[:, :5], FORWARD)


# One function, however it runs


@every_model
def test_scan_equals_unrolled(model: ModelConfig) -> None:
    scanned, unrolled = (logits_and_gradients(with_compute(model, layers=layers)) for layers in ("scan", "unrolled"))
    assert_close(unrolled, scanned, GRADIENT)


@pytest.mark.core
@pytest.mark.parametrize("layers", ["scan", "unrolled"])
@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_recomputation_changes_nothing(remat: str, layers: str) -> None:
    plain = logits_and_gradients(with_compute(MODERN, layers=layers))
    assert_close(logits_and_gradients(with_compute(MODERN, layers=layers, remat=remat)), plain, GRADIENT)


@pytest.mark.core
def test_jit_equals_no_jit() -> None:
    found = definition(with_compute(MODERN, layers="unrolled"))
    params, factors = numbers(found)
    tokens = inputs_of(MODERN)
    assert_close(found.bind(params, factors)(tokens), logits_of(found, params, factors, tokens), FORWARD)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("model", [MODERN, VIT], ids=model_id)
def test_attention_implementations_agree_inside_a_model(model: ModelConfig) -> None:
    merged, xla = (logits_and_gradients(with_compute(model, attention=name)) for name in ("auto", "xla"))
    assert_close(xla, merged, GRADIENT)


def primitives(model: ModelConfig) -> dict[str, int]:
    """How often each primitive stands in the traced gradient; a product says whether it has batch dimensions."""
    found = definition(model)
    params, factors = numbers(found)

    def loss(params: Arrays) -> jax.Array:
        return jnp.sum(found.bind(params, factors)(inputs_of(model)))  # pyright: ignore[reportCallIssue]

    counts: dict[str, int] = {}

    def count(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "dot_general":
                name = "batched product" if equation.params["dimension_numbers"][1][0] else "product"
            counts[name] = counts.get(name, 0) + 1
            for inner in jaxprs_in_params(equation.params):
                count(inner)

    count(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    return counts


def test_scan_and_recomputation_are_what_runs() -> None:
    # The equalities above would also hold if the options did nothing.
    plain, dots, block = (primitives(with_compute(DECODER, remat=remat)) for remat in ("none", "dots", "block"))
    unrolled = primitives(with_compute(DECODER, layers="unrolled"))
    assert "scan" in plain
    assert "scan" not in unrolled
    assert unrolled["product"] > 1.5 * plain["product"]
    assert plain["product"] == dots["product"] < block["product"]
    assert plain["batched product"] < dots["batched product"]
    assert plain["tanh"] < dots["tanh"] == block["tanh"]


# The vision transformer


@pytest.mark.core
@every_model
def test_logits_are_float32_of_the_expected_shape(model: ModelConfig) -> None:
    found = definition(with_compute(model, dtype="bfloat16"))
    out = jax.eval_shape(lambda p, f, x: found.bind(p, f)(x), *numbers(found), inputs_of(model, 5))  # pyright: ignore
    expected = (5, 7, 17) if isinstance(model, DecoderConfig) else (5, 7)
    assert out == jax.ShapeDtypeStruct(expected, jnp.float32)


@pytest.mark.parametrize("model", [VIT, CLS], ids=model_id)
def test_patches_are_a_strided_convolution(model: ViTConfig) -> None:
    found = definition(model)
    params, factors = numbers(found)
    images = inputs_of(model)
    bound: Any = found.bind(params, factors)
    kernel = params["patch"].reshape(model.patch_size, model.patch_size, model.channels, model.width)
    patches = jax.lax.conv_general_dilated(
        images, kernel, (model.patch_size,) * 2, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    rows = patches.reshape(len(images), model.num_patches, model.width) + params["patch_bias"]
    if model.pool == "cls":
        rows = jnp.concatenate([jnp.broadcast_to(params["cls"], (len(images), 1, model.width)), rows], axis=1)
    assert_close(bound.embed(images), rows + params["position"], FORWARD)


@pytest.mark.parametrize("model", [VIT, CLS], ids=model_id)
def test_the_order_of_patches_is_known_by_their_positions_alone(model: ViTConfig) -> None:
    found = definition(model)
    params, factors = numbers(found)
    images = inputs_of(model)
    grid, size, first = model.image_size // model.patch_size, model.patch_size, int(model.pool == "cls")
    order = (4 * np.arange(model.num_patches) + 2) % model.num_patches  # every patch moves
    cells = (
        images.reshape(-1, grid, size, grid, size, model.channels)
        .swapaxes(2, 3)
        .reshape(-1, grid**2, size, size, model.channels)
    )
    shuffled = cells[:, order].reshape(-1, grid, grid, size, size, model.channels).swapaxes(2, 3).reshape(images.shape)
    moved = params["position"].at[first:].set(params["position"][first:][order])
    run = functools.partial(logits_of, found)
    same, other = run({**params, "position": moved}, factors, shuffled), run(params, factors, shuffled)
    assert_close(same, run(params, factors, images), FORWARD)
    assert np.abs(other - run(params, factors, images)).max() > 1e-2


def test_a_vit_sees_every_patch_from_everywhere() -> None:
    found = definition(CLS)
    params, factors = numbers(found)
    pixels = jax.jit(jax.grad(lambda x: jnp.sum(found.bind(params, factors)(x)[:, 0])))(inputs_of(CLS))  # pyright: ignore
    assert (np.abs(pixels) > 0).all()


# Attention


def projections(heads: int, kv_heads: int, *, batch: int = 3, length: int = 7, size: int = 5) -> list[jax.Array]:
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
def test_attention_equals_its_definition(implementation: Any, heads: int, kv_heads: int, causal: bool) -> None:
    q, k, v = projections(heads, kv_heads)
    found = attend(q, k, v, causal=causal, implementation=implementation)
    np.testing.assert_allclose(found, reference_attention(q, k, v, causal=causal), rtol=0, atol=FORWARD)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_implementations_have_one_gradient(causal: bool) -> None:
    q, k, v = projections(6, 2)
    weights = jnp.asarray(np.random.default_rng(6).standard_normal(q.shape), jnp.float32)

    def gradients(run: Callable[..., jax.Array]) -> Any:
        return jax.jit(jax.grad(lambda *qkv: jnp.sum(weights * run(*qkv)), argnums=(0, 1, 2)))(q, k, v)

    merged = gradients(lambda *qkv: merged_attention(*qkv, causal=causal))
    assert_close(gradients(lambda *qkv: attend(*qkv, causal=causal, implementation="xla")), merged, GRADIENT)


def test_grouped_queries_are_repeated_keys_and_values() -> None:
    grouped = dataclasses.replace(DECODER, qk_norm=False)
    whole = dataclasses.replace(grouped, num_kv_heads=grouped.num_heads)
    found, wide = definition(grouped), definition(whole)
    params, factors = numbers(found)
    repeats = grouped.num_heads // grouped.kv_heads

    def repeated(name: str) -> jax.Array:
        axes = found.specs[name].axes
        return jnp.repeat(params[name], repeats, axis=axes.index("kv_heads")) if "kv_heads" in axes else params[name]

    tokens = inputs_of(grouped)
    few = logits_of(found, params, factors, tokens)
    many = logits_of(wide, {name: repeated(name) for name in params}, factors, tokens)
    assert found.abstract["block.attention.key"].shape != wide.abstract["block.attention.key"].shape
    assert_close(few, many, FORWARD)


def test_a_key_bias_exists_only_where_it_has_a_gradient() -> None:
    assert "block.attention.key_bias" not in definition(DECODER).specs
    assert "block.attention.key_bias" not in definition(VIT).specs
    for model in (MODERN, TIED, CLS):
        _, gradients = logits_and_gradients(model)
        sizes = {name: np.abs(gradients[f"block.attention.{name}"]).max() for name in ("key_bias", "query_bias")}
        assert sizes["key_bias"] > 0.1 * sizes["query_bias"] > 0


@pytest.mark.parametrize(("rotate", "share"), [(False, False), (True, True)])
def test_why_a_key_bias_is_left_out(rotate: bool, share: bool) -> None:
    # A bias on every key shifts a query's logits by one number, which softmax ignores; rotation makes it depend on the key.
    q, k, v = projections(3, 3, size=4)
    weights = jnp.asarray(np.random.default_rng(6).standard_normal(q.shape), jnp.float32)

    def loss(bias: jax.Array) -> jax.Array:
        queries, keys = (rotary(x, 100.0) for x in (q, k + bias)) if rotate else (q, k + bias)
        return jnp.sum(weights * merged_attention(queries, keys, v, causal=True))

    at_keys = jax.jit(jax.grad(lambda k: jnp.sum(weights * merged_attention(q, k, v, causal=True))))(k)
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
    np.testing.assert_allclose(rotary(x, theta), np.concatenate([turned.real, turned.imag], axis=-1), atol=FORWARD)


def test_rotary_logits_depend_on_distance_alone() -> None:
    random = np.random.default_rng(7)
    q, k = (jnp.broadcast_to(jnp.asarray(random.standard_normal(6), jnp.float32), (1, 11, 1, 6)) for _ in range(2))
    logits = np.einsum("btn,bsn->ts", *(np.asarray(rotary(x, 50.0))[:, :, 0] for x in (q, k)))
    for distance in range(-10, 11):
        diagonal = np.diagonal(logits, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(logits[0]) > 0.1


# Readout and QK-norm


def test_a_tied_readout_is_the_embedding_times_its_factor() -> None:
    untied = dataclasses.replace(TIED, tied=False)
    found, free = definition(TIED), definition(untied)
    params, factors = numbers(found)
    tokens = inputs_of(TIED)
    assert "readout" not in found.specs
    tied = logits_of(found, params, factors, tokens)
    own = {**params, "readout": factors["tied_readout"] * params["token"].T}
    others = {name: value for name, value in factors.items() if name != "tied_readout"}
    assert_close(tied, logits_of(free, own, others, tokens), FORWARD)


@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_forgets_the_length_of_queries_and_keys(normed: bool) -> None:
    model = dataclasses.replace(BARE, qk_norm=normed, norm_gain=True)
    found = definition(model)
    params, factors = numbers(found)
    grown = {name: value * (3.0 if name.endswith(("query", "key")) else 1.0) for name, value in params.items()}
    before, after = (logits_of(found, p, factors, inputs_of(model)) for p in (params, grown))
    change = np.abs(after - before).max() / np.abs(before).max()
    # The norm's epsilon of 1e-5, beside squares of about 0.5, is what is left.
    assert change < 1e-4 if normed else change > 1e-2


# Factors


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


# Layers


def test_norms_equal_their_formulas() -> None:
    random = np.random.default_rng(10)
    x = (3 + 2 * random.standard_normal((3, 5, 7))).astype(np.float32)
    gain, bias = random.standard_normal((2, 7)).astype(np.float32)
    init = Init(nnx.Rngs(0), {"embed": 7})
    layer, rms = Norm("layernorm", init, gain=True, bias=True), Norm("rmsnorm", init, gain=True, bias=False)
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
        project(jnp.asarray(x), jnp.asarray(w), inputs=2), np.einsum("abij,ijkl->abkl", x, w), atol=1e-4
    )
    half = project(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), inputs=2)
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_mlps_equal_their_formulas(activation: Any) -> None:
    config = dataclasses.replace(DECODER, activation=activation)
    mlp = MLP(config, Init(nnx.Rngs(0), config.sizes()))
    random = np.random.default_rng(12)
    for _, variable in nnx.to_flat_state(nnx.state(mlp)):
        variable.set_value(jnp.asarray(random.standard_normal(variable.shape), jnp.float32))
    p = {path[0]: np.asarray(variable[...], np.float64) for path, variable in nnx.to_flat_state(nnx.state(mlp))}
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


# Precision


def test_bfloat16_products_stay_near_float32() -> None:
    half, whole = (logits_and_gradients(with_compute(MODERN, dtype=dtype)) for dtype in ("bfloat16", "float32"))
    # bfloat16 keeps 8 bits: 2^-8 = 0.4 % a rounding, and errors of three blocks add up.
    assert_close(half[0], whole[0], 0.05)
    assert np.abs(half[0] - whole[0]).max() > 1e-4, "nothing ran in bfloat16"
    chex.assert_trees_all_equal_dtypes(half[1], whole[1])


def test_parameters_are_stored_as_asked() -> None:
    found = definition(dataclasses.replace(DECODER, compute=ComputeConfig(param_dtype="bfloat16")))
    assert {leaf.dtype for leaf in found.abstract.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in definition(DECODER).abstract.values()} == {jnp.dtype(jnp.float32)}
