"""The models against independent formulas: what a position may see, and that every way to run them is one function.

Every parameter and factor is drawn at random, biases and gains too: nothing hides behind a zero or a one. All tolerances
are for float32, relative to the largest entry: 2e-5 for one pass, 1e-4 for gradients, which sum over more.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from mupax.zoo import partition
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import Arrays, Definition, define, definition
from mupax.zoo.layers.stack import REMAT, UNROLLED_DEPTH, runs_as_scan

FORWARD, GRADIENT = 2e-5, 1e-4

DECODER = DecoderConfig(
    width=11, depth=2, num_heads=6, num_kv_heads=2, head_dim=4, mlp_ratio=13 / 11, vocab_size=17, seq_len=7
)
MODERN = dataclasses.replace(DECODER, positions="rotary", norm="rmsnorm", activation="swiglu", qk_norm=True)
GEMMA = dataclasses.replace(
    MODERN,
    depth=3,
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
VIT = ViTConfig(width=10, depth=2, num_heads=5, mlp_ratio=1.3, image_size=9, patch_size=3, channels=2, num_classes=7)
CLS = dataclasses.replace(VIT, pool="cls-mean", registers=2, layer_scale=0.5, qk_norm=True, pre_logits=True)
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


def logits_and_gradients(model: ModelConfig) -> Any:
    """Logits, and the gradient of a random linear function of them, of a model with the `numbers` of its definition."""
    return _logits_and_gradients(with_compute(model, layers="scan" if runs_as_scan(model.compute, 2) else "unrolled"))


@functools.cache
def _logits_and_gradients(model: ModelConfig) -> Any:
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
        made = model.module(nnx.Rngs(0))
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


def test_layers_that_see_differently_are_one_loop_over_groups() -> None:
    rest = with_compute(GEMMA, layers="scan", remat="block")  # a group of two, and a third layer
    assert_close(logits_and_gradients(rest), logits_and_gradients(with_compute(GEMMA, layers="scan")), GRADIENT)
    counts = primitives(with_compute(GEMMA, layers="scan"))
    assert counts["scan"] == primitives(with_compute(MODERN, layers="scan"))["scan"]
    found = definition(GEMMA)
    own, params = logits_of(found, *numbers(found), inputs_of(GEMMA)), numbers(found)
    for change in ({"full_every": None}, {"window_theta": None}, {"attention_softcap": None}, {"logit_softcap": None}):
        other = logits_of(definition(dataclasses.replace(GEMMA, **change)), *params, inputs_of(GEMMA))
        assert np.abs(other - own).max() > 1e-3, change


@pytest.mark.parametrize("model", [MODERN, VIT], ids=model_id)
def test_fused_projections_change_nothing(model: ModelConfig) -> None:
    separate, fused = (with_compute(model, projections=name) for name in ("separate", "fused"))
    assert_close(logits_and_gradients(fused), logits_and_gradients(separate), GRADIENT)
    # One product for three, and for a gated MLP one for two, forward and twice backward.
    saved = 4 if isinstance(model, DecoderConfig) else 2
    found = [
        primitives(dataclasses.replace(m, compute=dataclasses.replace(m.compute, layers="scan")))
        for m in (separate, fused)
    ]
    assert found[0]["product"] - found[1]["product"] >= saved
    assert definition(fused).specs == definition(separate).specs


@pytest.mark.core
def test_auto_unrolls_on_cpu_alone() -> None:
    class Device:
        platform = "tpu"

    compute = ComputeConfig()
    assert not runs_as_scan(compute, UNROLLED_DEPTH)
    assert runs_as_scan(compute, UNROLLED_DEPTH + 1)
    with partition.using(Device()):  # pyright: ignore
        assert runs_as_scan(compute, 2)
        assert not runs_as_scan(dataclasses.replace(compute, layers="unrolled"), 2)


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
    plain, dots, block = (
        primitives(with_compute(DECODER, layers="scan", remat=remat)) for remat in ("none", "dots", "block")
    )
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
    if model.pool != "mean":
        leading_RD = jnp.concatenate([params["cls"][None], jnp.zeros((2, model.width))])
        rows = jnp.concatenate([jnp.broadcast_to(leading_RD, (len(images), *leading_RD.shape)), rows], axis=1)
    assert_close(bound.embed(images), rows + params["position"], FORWARD)


@pytest.mark.parametrize("model", [VIT, CLS], ids=model_id)
def test_the_order_of_patches_is_known_by_their_positions_alone(model: ViTConfig) -> None:
    found = definition(model)
    params, factors = numbers(found)
    images = inputs_of(model)
    grid, size, first = model.image_size // model.patch_size, model.patch_size, model.leading
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
