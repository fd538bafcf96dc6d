"""Folding: the plain network with folded weights is the model with its multipliers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.presets import Preset
from mupax.train.core.factors import resolve
from mupax.train.reuse import plain
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import definition
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.transformer import RoutingConfig
from tests.train.reuse.scaled_models import (
    BASE,
    changed,
    forward_program,
    inputs_of,
    random_weights,
)

pytestmark = pytest.mark.core

SIZES: Any = {
    "width": 12,
    "depth": 3,
    "num_heads": 3,
    "mlp_ratio": 1.5,
    "compute": ComputeConfig(layers="scan"),
}
TIED = DecoderConfig(**SIZES, vocab_size=17, seq_len=5, tied=True)
ROTARY = changed(
    TIED, positions="rotary", tied=False, num_kv_heads=1, norm="rmsnorm", activation="swiglu"
)
VIT = ViTConfig(**SIZES, image_size=6, patch_size=3, num_classes=5)
TRANSLATOR = EncoderDecoderConfig(**SIZES, encoder_depth=2, vocab_size=17, seq_len=6, target_len=5)
EXPERTS = changed(
    ROTARY,
    depth=1,
    bias=True,
    experts=3,
    active_experts=2,
    shared_experts=1,
    routing=RoutingConfig(balance="bias"),
)
BASE_OF_EXPERTS = {**BASE, "experts": 2, "active": 2, "expert_dim": 6}

CASES: dict[str, tuple[Any, Preset]] = {
    "mup, tied": (TIED, presets.get("mup", base=BASE)),
    "mup, tied, no gains": (changed(TIED, norm_gain=False, bias=False), presets.get("mup")),
    "depth-mup, rotary": (ROTARY, presets.get("depth-mup", base=BASE, gamma0=0.5, beta0=3.0)),
    "depth-mup, queries normalized": (
        changed(ROTARY, qk_norm=True),
        presets.get("depth-mup", base=BASE),
    ),
    "depth-mup, encoder-decoder": (TRANSLATOR, presets.get("depth-mup", base=BASE, beta0=3.0)),
    "depth-mup, experts": (EXPERTS, presets.get("depth-mup", base=BASE_OF_EXPERTS, beta0=3.0)),
    "mean-field, ViT": (VIT, presets.get("mup", base=BASE, form="mean-field")),
}


def arguments_of(model: ModelConfig) -> tuple[jax.Array, ...]:
    """Return random inputs of a model, with a mask and targets for an encoder-decoder."""
    if not isinstance(model, EncoderDecoderConfig):
        return (inputs_of(model),)
    random = np.random.default_rng(1)
    tokens = jnp.asarray(random.integers(17, size=(2, model.seq_len)), jnp.int32)
    return tokens, jnp.ones_like(tokens).at[1, 4:].set(0), tokens[:, : model.targets]


def difference(
    model: Any, preset: Preset, change: Callable[[plain.Scales], plain.Scales] | None = None
) -> float:
    """Return the largest difference of logits between a model and its plain network.

    Args:
        model: Config of the model. It has its multipliers, and the plain network folded weights.
        change: Makes wrong scales of the right ones.
    """
    built = definition(model)
    factors = resolve(preset, built, preset.optimizers[0])
    params = random_weights(built, factors)
    scales = plain.scales(built, factors)
    if change is not None:
        scales = change(scales)
    folded = plain.absorb_multipliers(params, scales)

    # A tied model without gains has one in the plain network.
    plain_model = model if plain.GAIN in built.specs else changed(model, norm_gain=True)
    network = definition(plain_model)
    weights = {}
    for name, leaf in network.abstract.items():
        weights[name] = folded.get(name, np.ones(leaf.shape, np.float32))
    # Of the shapes of the factors, so that both take one program.
    ones = {name: np.float32(1) for name in weights}
    ones |= {name: np.ones_like(a) for name, a in factors.multiplier.items()}
    standard = {}
    for name, factor in network.factors.items():
        if factor["kind"] != "skip":
            value = built.sizes["head_dim"] ** -0.5 if factor["kind"] == "logits" else 1.0
            standard[name] = np.full(factor["shape"], value, np.float32)

    arguments = arguments_of(model)
    program = forward_program(model)
    expected = np.asarray(program(params, factors.multiplier, factors.forward, *arguments))
    logits = np.asarray(forward_program(plain_model)(weights, ones, standard, *arguments))
    assert np.abs(expected).max() > 0.3
    return float(np.abs(logits - expected).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plain_network_is_the_same_function(case: tuple[ModelConfig, Preset]) -> None:
    assert difference(*case) < 2e-5


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mup, tied", "block.attention.query"),
        ("depth-mup, rotary", "block.mlp.down_bias"),
        ("depth-mup, experts", "block.experts.down_bias"),
        ("mup, tied", "norm.gain"),
        ("mup, tied", "token"),
        ("depth-mup, encoder-decoder", "block.cross.query"),
        ("depth-mup, encoder-decoder", "block.cross.out"),
        ("depth-mup, encoder-decoder", "encoder.block.mlp.down"),
        ("depth-mup, encoder-decoder", "encoder.norm.gain"),
    ],
)
def test_control_every_scale_counts(case: str, name: str) -> None:
    wrong = difference(*CASES[case], lambda scales: {**scales, name: scales[name] * 1.3})
    assert wrong > 1e-3


def test_unfolding_is_the_inverse() -> None:
    for model, preset in CASES.values():
        built = definition(model)
        factors = resolve(preset, built, preset.optimizers[0])
        params = random_weights(built, factors)
        scales = plain.scales(built, factors)
        folded = plain.absorb_multipliers(params, scales)
        back = plain.restore_multipliers({name: folded[name] for name in params}, scales)
        for name, w in params.items():
            np.testing.assert_allclose(back[name], w, rtol=2e-7, err_msg=name)


def test_skips_fold_but_for_the_norms_eps() -> None:
    model = changed(ROTARY, norm_eps=1e-12)
    preset = presets.get("u-mup")
    assert difference(model, preset) < 2e-5
    # With an eps that counts, what is left is what the module's text says: eps (c^-2 - 1) / 2 of a
    # norm's output, through seven norms, in logits that are at most 3 here.
    built = definition(model)
    skips = resolve(preset, built, "adam").forward["block.skip"]
    c = float(np.prod(skips))
    eps = 1e-3
    left = difference(changed(model, norm_eps=eps), preset)
    assert 2e-5 < left < 7 * 3 * eps * (c**-2 - 1) / 2
    # Control: without the skips in the branches' scales the function is another.
    down = "block.mlp.down"
    wrong = difference(model, preset, lambda scales: {**scales, down: scales[down] * c})
    assert wrong > 1e-2


def test_what_cannot_be_folded_is_refused() -> None:
    built = definition(TIED)
    factors = resolve(presets.get("mup"), built)
    zero = factors._replace(forward={**factors.forward, "block.branch": np.zeros((3, 2))})
    with pytest.raises(plain.AbsorbError, match="a weight cannot carry"):
        plain.scales(built, zero)


def test_scales_as_json_keep_layers_apart_only_where_they_differ() -> None:
    values: Any = (np.float64(3.0), np.array([2.0, 2.0]), np.array([1.0, 2.0]))
    assert [plain.number(value) for value in values] == [3.0, 2.0, [1.0, 2.0]]
