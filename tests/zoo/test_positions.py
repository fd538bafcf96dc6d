"""Fields of positions and of what attention sees that do not fit together: one message each, before anything is built."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from flax import nnx

from mupax.zoo import configs
from mupax.zoo.configs import ConfigError, ViTConfig
from mupax.zoo.vit.sines import sines


@pytest.mark.core
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_factor": 3.0},
            "model.rope_factor is 3.0, and only scaled frequencies read it; write model.rope_scaling llama3",
        ),
        ({"rope_scaling": "llama3"}, "rope_scaling is llama3, and only rotary positions read it"),
        (
            {"positions": "rotary", "rope_scaling": "linear", "rope_factor": 0.5},
            "rope_factor is 0.5",
        ),
        (
            {"positions": "rotary", "rope_scaling": "llama3", "rope_low_freq_factor": 5.0},
            "rope_low_freq_factor 5.0",
        ),
        ({"rotary_fraction": 0.5}, "rotary_fraction is 0.5, and only rotary positions read it"),
        ({"positions": "rotary", "rotary_fraction": 0.01}, "makes an even number"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_fields_of_positions_that_do_not_fit_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(configs.ConfigError, match=message):
        dataclasses.replace(configs.get("gpt2"), **fields)


def test_fixed_positions_of_images_are_sines_of_column_and_row() -> None:
    config = ViTConfig(
        width=16,
        depth=1,
        num_heads=2,
        image_size=12,
        patch_size=4,
        channels=1,
        num_classes=3,
        pool="cls",
        sincos=True,
    )
    model = config.module(nnx.Rngs(0))
    table = sines(config)
    assert "position" not in config.parameters()
    assert table.shape == (10, 16)
    assert not table[0].any()
    for patch in range(9):
        row, column = divmod(patch, 3)
        for i in range(4):
            wave = 10_000 ** -(i / 3)
            want = [
                math.sin(column * wave),
                math.cos(column * wave),
                math.sin(row * wave),
                math.cos(row * wave),
            ]
            np.testing.assert_allclose(table[1 + patch, [i, 4 + i, 8 + i, 12 + i]], want, atol=1e-6)
    image = np.random.default_rng(0).normal(size=(1, 12, 12, 1)).astype(np.float32)
    assert np.abs(model.embed(image)[0] - model.embed(np.zeros_like(image))[0])[1:].min() > 0
    with pytest.raises(ConfigError, match="write a multiple of 4"):
        dataclasses.replace(config, width=18)
    with pytest.raises(ConfigError, match=r"model\.sincos has none; write one of them"):
        dataclasses.replace(config, registers=2)
