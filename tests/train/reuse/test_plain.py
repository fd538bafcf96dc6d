"""Folding: the plain network with folded weights is the model with its multipliers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.presets import VECTORS, Preset
from mupax.train.core.factors import Factors, resolve
from mupax.train.reuse import plain as fold
from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.transformer import RoutingConfig

pytestmark = pytest.mark.core

TIED = DecoderConfig(
    width=12, depth=3, num_heads=3, mlp_ratio=1.5, vocab_size=17, seq_len=5, tied=True
)
ROTARY = dataclasses.replace(
    TIED, positions="rotary", tied=False, num_kv_heads=1, norm="rmsnorm", activation="swiglu"
)
VIT = ViTConfig(
    width=12, depth=3, num_heads=3, mlp_ratio=1.5, image_size=6, patch_size=3, num_classes=5
)
TRANSLATOR = EncoderDecoderConfig(
    width=12,
    depth=3,
    encoder_depth=2,
    num_heads=3,
    mlp_ratio=1.5,
    vocab_size=17,
    seq_len=6,
    target_len=5,
)
EXPERTS = dataclasses.replace(
    ROTARY,
    depth=1,
    bias=True,
    experts=3,
    active_experts=2,
    shared_experts=1,
    routing=RoutingConfig(balance="bias"),
)
BASE = {"embed": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp": 12, "layers": 2}
OF_EXPERTS = {**BASE, "experts": 2, "active": 2, "expert_dim": 6}

CASES: dict[str, tuple[ModelConfig, Preset]] = {
    "mup, tied": (TIED, presets.get("mup", base=BASE)),
    "mup, tied, no gains": (
        dataclasses.replace(TIED, norm_gain=False, bias=False),
        presets.get("mup"),
    ),
    "depth-mup, rotary": (ROTARY, presets.get("depth-mup", base=BASE, gamma0=0.5, beta0=3.0)),
    "depth-mup, queries normalized": (
        dataclasses.replace(ROTARY, qk_norm=True),
        presets.get("depth-mup", base=BASE),
    ),
    "depth-mup, encoder-decoder": (TRANSLATOR, presets.get("depth-mup", base=BASE, beta0=3.0)),
    "depth-mup, experts": (EXPERTS, presets.get("depth-mup", base=OF_EXPERTS, beta0=3.0)),
    "mean-field, ViT": (VIT, presets.get("mup", base=BASE, form="mean-field")),
}


def numbers(built: Definition, preset: Preset) -> tuple[dict[str, Any], Factors]:
    """Random weights, so large that the model's products are of order one, and the preset's factors."""
    random, factors = np.random.default_rng(0), resolve(preset, built, preset.optimizers[0])

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        spec, normal = built.specs[name], random.standard_normal(shape)
        size = (
            0.3
            if spec.role in VECTORS
            else np.prod([built.sizes[axis] for axis in spec.fan_in]) ** -0.5
        )
        a = factors.multiplier[name].reshape(-1, *[1] * (len(shape) - 1))
        return (
            ((float(spec.role.value == "norm_gain") + size * normal) / a)
            .astype(np.float32)
            .reshape(shape)
        )

    return {name: draw(name, leaf.shape) for name, leaf in built.abstract.items()}, factors


def inputs_of(model: ModelConfig) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(1)
    if isinstance(model, ViTConfig):
        return (
            jnp.asarray(
                random.standard_normal((2, model.image_size, model.image_size, model.channels)),
                jnp.float32,
            ),
        )
    tokens = jnp.asarray(random.integers(17, size=(2, model.seq_len)), jnp.int32)
    if not isinstance(model, EncoderDecoderConfig):
        return (tokens,)
    return tokens, jnp.ones_like(tokens).at[1, 4:].set(0), tokens[:, : model.targets]


def difference(model: ModelConfig, preset: Preset, change: Any = None) -> float:
    """Largest difference of logits between a model under a preset and the plain network with the folded weights."""
    built = definition(model)
    params, factors = numbers(built, preset)
    by = fold.scales(built, factors)
    if change is not None:
        by = change(by)
    folded = fold.absorb_multipliers(params, by)
    full = (
        definition(dataclasses.replace(model, norm_gain=True))
        if fold.GAIN not in built.specs
        else built
    )
    folded = {
        name: folded.get(name, np.ones(leaf.shape, np.float32))
        for name, leaf in full.abstract.items()
    }
    plain = {
        name: jnp.full(f["shape"], {"logits": built.sizes["head_dim"] ** -0.5}.get(f["kind"], 1.0))
        for name, f in full.factors.items()
        if f["kind"] != "skip"
    }
    x = inputs_of(model)
    want = np.asarray(built.apply(params, factors.multiplier, factors.forward, *x))
    got = np.asarray(full.apply(folded, {name: np.float32(1) for name in folded}, plain, *x))
    assert np.abs(want).max() > 0.3
    return float(np.abs(got - want).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plain_network_is_the_same_function(case: tuple[ModelConfig, Preset]) -> None:
    assert difference(*case) < 2e-5


@pytest.mark.parametrize(
    "name",
    [
        "block.attention.query",
        "block.mlp.down_bias",
        "block.experts.down_bias",
        "norm.gain",
        "token",
    ],
)
def test_control_every_scale_counts(name: str) -> None:
    cases = {
        "block.mlp.down_bias": "depth-mup, rotary",
        "block.experts.down_bias": "depth-mup, experts",
    }
    model, preset = CASES[cases.get(name, "mup, tied")]
    assert difference(model, preset, lambda by: {**by, name: by[name] * 1.3}) > 1e-3


@pytest.mark.parametrize(
    "name", ["block.cross.query", "block.cross.out", "encoder.block.mlp.down", "encoder.norm.gain"]
)
def test_control_every_scale_of_an_encoder_decoder_counts(name: str) -> None:
    model, preset = CASES["depth-mup, encoder-decoder"]
    assert difference(model, preset, lambda by: {**by, name: by[name] * 1.3}) > 1e-3


def test_unfolding_is_the_inverse() -> None:
    for model, preset in CASES.values():
        built = definition(model)
        params, factors = numbers(built, preset)
        by = fold.scales(built, factors)
        back = fold.restore_multipliers(
            {name: w for name, w in fold.absorb_multipliers(params, by).items() if name in params},
            by,
        )
        for name, w in params.items():
            np.testing.assert_allclose(back[name], w, rtol=2e-7, err_msg=name)


def test_skips_fold_but_for_the_norms_eps() -> None:
    model = dataclasses.replace(ROTARY, norm_eps=1e-12)
    preset = presets.get("u-mup")
    assert difference(model, preset) < 2e-5
    # With an eps that counts, what is left is what the module's text says: eps (c^-2 - 1) / 2 of a norm's output, through
    # seven norms, in logits that are at most 3 here.
    built = definition(model)
    skips = resolve(preset, built, "adam").forward["block.skip"]
    c = float(np.prod(skips))
    eps = 1e-3
    left = difference(dataclasses.replace(model, norm_eps=eps), preset)
    assert 2e-5 < left < 7 * 3 * eps * (c**-2 - 1) / 2
    # Control: without the skips in the branches' scales the function is another.
    wrong = difference(model, preset, lambda by: {**by, "block.mlp.down": by["block.mlp.down"] * c})
    assert wrong > 1e-2


def test_what_cannot_be_folded_is_refused() -> None:
    built = definition(TIED)
    factors = resolve(presets.get("mup"), built)
    zero = factors._replace(forward={**factors.forward, "block.branch": np.zeros((3, 2))})
    with pytest.raises(fold.AbsorbError, match="a weight cannot carry"):
        fold.scales(built, zero)


def test_scales_as_json_keep_layers_apart_only_where_they_differ() -> None:
    assert [
        fold.number(x) for x in (np.float64(3.0), np.array([2.0, 2.0]), np.array([1.0, 2.0]))
    ] == [
        3.0,
        2.0,
        [1.0, 2.0],
    ]
