"""Analytic parameter and FLOP counts against the built models and against what JAX traces and XLA compiles."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mupax.zoo import families
from mupax.zoo.configs import (
    CONFIGS,
    ComputeConfig,
    DecoderConfig,
    EncoderDecoderConfig,
    ModelConfig,
    ViTConfig,
)
from mupax.zoo.definition import definition

# Small distinct sizes; every option that adds or removes a parameter or a product appears on and off.
DECODER = DecoderConfig(width=30, depth=3, num_heads=5, vocab_size=37, seq_len=11, mlp_ratio=1.7)
VIT = ViTConfig(
    width=42,
    depth=2,
    num_heads=7,
    image_size=15,
    patch_size=5,
    channels=3,
    num_classes=13,
    mlp_ratio=0.5,
)
BART = EncoderDecoderConfig(
    width=30,
    depth=3,
    encoder_depth=2,
    num_heads=5,
    vocab_size=37,
    seq_len=12,
    target_len=8,
    mlp_ratio=1.7,
)
VARIANTS: dict[str, ModelConfig] = {
    "decoder": DECODER,
    "decoder-tied": dataclasses.replace(DECODER, tied=True),
    "decoder-rotary": dataclasses.replace(DECODER, positions="rotary", norm="rmsnorm"),
    "decoder-swiglu": dataclasses.replace(DECODER, activation="swiglu", norm_gain=False),
    "decoder-grouped": dataclasses.replace(
        DECODER, num_heads=6, num_kv_heads=2, head_dim=4, positions="rotary", bias=False
    ),
    "decoder-qk-norm": dataclasses.replace(DECODER, qk_norm=True),
    "decoder-qk-norm-no-gain": dataclasses.replace(DECODER, qk_norm=True, norm_gain=False),
    "vit": VIT,
    "vit-cls": dataclasses.replace(VIT, pool="cls", qk_norm=True),
    "vit-bare": dataclasses.replace(VIT, bias=False, norm_gain=False, head_dim=3),
    "bart": BART,
    "t5": dataclasses.replace(
        BART,
        positions="relative",
        activation="geglu",
        tied=False,
        shared=False,
        embedding_norm=False,
        norm="rmsnorm",
    ),
}


@pytest.mark.parametrize("name", [*CONFIGS, *VARIANTS])
def test_params_equal_the_built_tree(name: str) -> None:
    model = {**CONFIGS, **VARIANTS}[name]
    assert families.params(model) == definition(model).count()


def test_params_of_published_models() -> None:
    # Table I of 2304.02034, a sum of rounded terms, and what transformers counts of google/t5 and google/flan-t5.
    assert families.params(CONFIGS["bart-large"]) / 1e6 == pytest.approx(
        51.5 + 1.1 + 151.0 + 201.3, abs=0.1
    )
    assert families.params(CONFIGS["r2c2"]) / 1e9 == pytest.approx(2.7, abs=0.05)
    published = {
        "t5-small": 60_506_624,
        "t5-base": 222_903_552,
        "flan-t5-small": 76_961_152,
        "flan-t5-base": 247_577_856,
    }
    assert {name: families.params(CONFIGS[name]) for name in published} == published
    # Radford et al.'s release has 124,439,808 numbers and Dosovitskiy et al.'s ViT-B/16 86,567,656; both with a key bias,
    # which is left out here (no gradient), and the ViT with a CLS token and its position.
    key_biases = 12 * 768
    assert families.params(CONFIGS["gpt2"]) == 124_439_808 - key_biases
    cls_token_and_position = 2 * 768
    assert families.params(CONFIGS["vit-b16"]) == 86_567_656 - key_biases - cls_token_and_position


def unrolled(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, compute=ComputeConfig(layers="unrolled"))


def example(model: ModelConfig) -> list[jax.ShapeDtypeStruct]:
    read = {name: of for name, of in model.example().items() if name not in ("targets", "weights")}
    return [jax.ShapeDtypeStruct((1, *of.shape), jnp.dtype(of.dtype)) for of in read.values()]


def forward(model: ModelConfig):
    graph, state = nnx.split(model.module(nnx.Rngs(0)))
    return lambda *inputs: nnx.merge(graph, state)(*inputs)


def traced_flops(jaxpr) -> int:
    """2 * multiply-adds of every dot_general in a jaxpr and those inside it."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[axis] for axis in summed)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            total += traced_flops(inner) if hasattr(inner, "eqns") else 0
    return total


def computed(model: ModelConfig) -> float:
    """Analytic count of one example as the zoo computes it: XLA's attention fills the masked half of a causal matrix too."""
    terms = families.forward_terms(model)
    if isinstance(model, DecoderConfig):
        return model.seq_len * (sum(terms.values()) + terms["attention"])
    if isinstance(model, EncoderDecoderConfig):
        masked = 2 * model.targets**2 * model.num_heads * model.heads_dim * model.depth
        return model.targets * sum(terms.values()) + masked
    return sum(terms.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_equal_the_traced_products(name: str) -> None:
    model = unrolled(VARIANTS[name])
    jaxpr = jax.make_jaxpr(forward(model))(*example(model))
    assert traced_flops(jaxpr.jaxpr) == pytest.approx(computed(model), rel=1e-12)


# XLA also counts norms, softmax, activations and masks: some 30 operations per width and position against the products'
# 24 * width, so 1 to 6 percent at these widths and never less than the products.
@pytest.mark.parametrize(
    "model",
    [
        DecoderConfig(
            width=192,
            depth=2,
            num_heads=3,
            vocab_size=257,
            seq_len=32,
            positions="rotary",
            activation="swiglu",
        ),
        ViTConfig(width=192, depth=2, num_heads=3, image_size=24, patch_size=4, num_classes=11),
    ],
    ids=["decoder", "vit"],
)
def test_flops_agree_with_xla(model: ModelConfig) -> None:
    model = unrolled(model)
    cost = jax.jit(forward(model)).lower(*example(model)).compile().cost_analysis()
    assert cost is not None
    assert computed(model) < cost["flops"] < 1.08 * computed(model)


def test_a_wrong_count_is_seen() -> None:
    # Control: one forgotten projection, or causal attention counted in full, is far outside of both comparisons.
    model = CONFIGS["lm-tiny"]
    terms = families.forward_terms(model)
    assert terms["attention projections"] / 4 > 0.08 * sum(terms.values()) / 2
    assert computed(model) > model.seq_len * sum(terms.values())


def test_centred_models_pay_for_the_frozen_forward_pass() -> None:
    plain = CONFIGS["vit-tiny"]
    centred = dataclasses.replace(plain, centered=True)
    assert families.train_flops(plain) == 3 * families.forward_flops(plain)
    assert families.train_flops(centred) == 4 * families.forward_flops(plain)


@pytest.mark.parametrize("width", [30, 60])
def test_causal_attention_counts_half_of_what_palms_mfu_counts(width: int) -> None:
    """PaLM, 2204.02311, appendix B: 12 L H Q T a token for attention, of a step, causal or not."""
    model = dataclasses.replace(DECODER, width=width)
    palm = 12 * model.depth * model.num_heads * model.heads_dim * model.seq_len
    assert (
        3 * families.forward_terms(model)["attention"] == palm / 2
    )  # a token is a decoder's unit, and an image a ViT's
    positions = VIT.sizes()["position"]
    complete = 12 * VIT.depth * VIT.num_heads * VIT.heads_dim * positions
    assert 3 * families.forward_terms(VIT)["attention"] / positions == complete
