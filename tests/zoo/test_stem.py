"""Convolutions that make a ViT's patches: their output, their count, and growth under a preset."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from scipy.signal import correlate2d

from mupax import presets
from mupax.presets.roles import ParamSpec, Role
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.zoo import families
from mupax.zoo.configs import ConfigError, ViTConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.vit.config import Convolution
from mupax.zoo.vit.model import convolve

MODEL = ViTConfig(
    width=32, depth=1, num_heads=2, image_size=16, patch_size=8, channels=3, num_classes=5, stem=3, norm="rmsnorm", bias=False
)  # fmt: skip


def test_a_convolution_is_that_of_scipy_with_a_border_of_zeros() -> None:
    rng = np.random.default_rng(0)
    image: Any = rng.standard_normal((1, 6, 6, 2)).astype(np.float32)
    weight: Any = rng.standard_normal((9, 2, 4)).astype(np.float32)
    kernel = weight.reshape(3, 3, 2, 4)
    expected = np.zeros((6, 6, 4))
    for output in range(4):
        for channel in range(2):
            expected[..., output] += correlate2d(
                image[0, ..., channel], kernel[..., channel, output], mode="same"
            )
    plain = convolve(image, weight, Convolution("second", 1, "embed", 6))
    np.testing.assert_allclose(plain[0], expected, rtol=1e-4, atol=1e-5)
    # With a stride of 2 the border of an even side is at its end: every second pixel, from the second.
    strided = convolve(image, weight, Convolution("second", 2, "embed", 3))
    np.testing.assert_allclose(strided[0], expected[1::2, 1::2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("patch_size", "stem", "strides", "kernel"),
    [
        (8, 3, (2, 2, 2), 3),
        (4, 3, (1, 2, 2), 3),
        (2, 2, (1, 2), 3),
        (16, 3, (4, 2, 2), 7),
        (1, 2, (1, 1), 3),
    ],
)
def test_strides_multiply_to_the_patch(
    patch_size: int, stem: int, strides: tuple[int, ...], kernel: int
) -> None:
    model = dataclasses.replace(MODEL, patch_size=patch_size, stem=stem)
    assert tuple(convolution.stride for convolution in model.convolutions) == strides
    assert model.convolutions[0].kernel == kernel
    assert model.convolutions[-1].side == model.position_grid
    structure = definition(model)
    logits = jax.eval_shape(
        lambda params: structure.bind(params, _factors(structure))(
            np.zeros((2, 16, 16, 3), np.float32)
        ),
        structure.abstract,
    )
    assert logits.shape == (2, 5)


def test_products_are_counted_once_per_pixel_that_they_write() -> None:
    terms = families.forward_terms(MODEL)
    assert terms["read-in"] == 2 * 8**2 * (27 * 8)
    assert terms["hidden"] == 2 * 4**2 * (9 * 8 * 16) + 2 * 2**2 * (9 * 16 * 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"stem": 4}, "write 2 or 3"), ({"width": 34, "stem": 3}, "multiple of 4")],
)
def test_a_stem_that_cannot_be_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(MODEL, **fields)


def _factors(structure: Definition) -> dict[str, np.ndarray]:
    return {
        name: np.full(factor["shape"], 0.25, np.float32)
        for name, factor in structure.factors.items()
    }


@functools.cache
def _step(model: ViTConfig) -> Callable[[Any, Any], jax.Array]:
    """Compile (parameters, factors) -> root mean square of the stem's change by a step of Adam."""
    structure = definition(model)
    tx = optimizer.build(OptimizerConfig(name="adam", peak_lr=1e-2), structure.specs)
    config = OptimizerConfig(name="adam", peak_lr=1e-2, schedule="constant")
    hyper = hyperparams(config, 2).at(jax.numpy.int32(0))
    images = np.random.default_rng(0).standard_normal((8, 16, 16, 3)).astype(np.float32)

    def change(params: Any, factors: Any) -> jax.Array:
        def network(params: Any) -> Any:
            return structure.model(params, factors.multiplier, factors.forward)

        def loss(params: Any) -> jax.Array:
            log_p = jax.nn.log_softmax(network(params)(images))
            return -log_p[np.arange(8), np.arange(8) % 5].mean()

        grads = jax.grad(loss)(params)
        moved, _ = optimizer.apply_gradients(
            tx, grads, tx.init(params), params, factors=factors, hyper=hyper
        )
        difference = network(moved).embed(images) - network(params).embed(images)
        return jax.numpy.sqrt(jax.numpy.mean(difference**2))

    return jax.jit(change, compiler_options={"xla_backend_optimization_level": 0})


def _moved(model: ViTConfig, preset: presets.Preset, wrong: frozenset[str] = frozenset()) -> float:
    """Return how far one step of Adam moves the output of the stem, as a root mean square.

    Args:
        preset: Preset relative to `MODEL`.
        wrong: Parameters whose rate does not fall with what they read.
    """
    structure = definition(model)
    specs = dict(structure.specs)
    for name in wrong:
        specs[name] = _without_growth(specs[name])
    factors = resolve(preset, dataclasses.replace(structure, specs=specs), "adam", "coupled")
    random = np.random.default_rng(1)
    params = {}
    for name, std in init_stds(preset, structure).items():
        # Gains start at their spread; other parameters are drawn.
        shape = structure.abstract[name].shape
        is_gain = structure.specs[name].role is Role.NORM_GAIN
        draw = np.ones(shape) if is_gain else random.standard_normal(shape)
        params[name] = np.asarray(std * draw, np.float32)
    return float(_step(model)(params, factors))


def _without_growth(spec: ParamSpec) -> ParamSpec:
    """Return the declaration of a kernel as of one that reads an input of fixed size."""
    return dataclasses.replace(spec, role=Role.PATCH_EMBEDDING, fan_in=("taps",))


def test_a_step_moves_what_the_stem_writes_alike_at_every_width_and_a_wrong_rule_is_seen() -> None:
    wide = dataclasses.replace(MODEL, width=256, num_heads=16)
    preset = presets.get("mup", base=MODEL.base_sizes())

    def growth(wrong: frozenset[str] = frozenset()) -> float:
        """Return the exponent in the width."""
        return math.log2(_moved(wide, preset, wrong) / _moved(MODEL, preset, wrong)) / math.log2(8)

    assert abs(growth()) < 0.15
    assert (
        growth(frozenset({"stem.third"})) > 0.3
    )  # a kernel's rate that does not fall with the channels it reads
