"""`vit-s16-imagenet` has the numbers of big_vision's vit_s16_i1k, each beside the line there that says it.

The sources are files of github.com/google-research/big_vision: configs/vit_s16_i1k.py where none is named.
"""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.preset import preset_of
from mupax.train.config.recipes.pods import vit_b16_imagenet, vit_s16_imagenet
from mupax.train.core.factors import schedule_table
from mupax.zoo.configs import ComputeConfig, ViTConfig

pytestmark = pytest.mark.core

RUN = vit_s16_imagenet()
MODEL = cast("ViTConfig", RUN.model)


def test_the_model() -> None:
    # variant='S/16': models/vit.py, decode_variant: width 384, depth 12, mlp_dim 1536, num_heads 6
    assert (MODEL.width, MODEL.depth, MODEL.mlp_dim, MODEL.num_heads) == (384, 12, 1536, 6)
    assert (MODEL.patch_size, MODEL.image_size, MODEL.num_classes) == (
        16,
        224,
        1000,
    )  # input.pp, config.num_classes
    assert MODEL.pool == "mean"  # pool_type='gap'
    assert MODEL.pre_logits  # rep_size=True: the width, and nn.tanh
    assert MODEL.sincos  # posemb='sincos2d'
    assert MODEL.activation == "gelu"  # MlpBlock: nn.gelu, whose default is the tanh form
    assert (MODEL.norm, MODEL.norm_eps, MODEL.norm_gain, MODEL.bias) == (
        "layernorm",
        1e-6,
        True,
        True,
    )  # nn.LayerNorm()
    assert MODEL.drop_path == 0  # dropout=0.0


def test_the_model_computes_what_models_vit_py_says() -> None:
    """Its forward pass as published, in float64, on a smaller model of the recipe's fields."""
    small = dataclasses.replace(
        MODEL,
        width=12,
        depth=2,
        num_heads=3,
        image_size=8,
        patch_size=4,
        channels=2,
        num_classes=5,
        compute=ComputeConfig(),
    )
    model, random = small.module(nnx.Rngs(0)), np.random.default_rng(0)
    names = small.parameters()
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert ".".join(map(str, path)) in names
        leaf.set_value(
            jnp.asarray(random.standard_normal(leaf.get_value().shape) * 0.3, jnp.float32)
        )
    w = {
        ".".join(map(str, path)): np.asarray(leaf.get_value(), np.float64)
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    images = random.standard_normal((3, 8, 8, 2))

    def norm(x: np.ndarray, name: str, *i: int) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * w[f"{name}.gain"][i] + w[f"{name}.bias"][i]

    patches = (
        images.reshape(3, 2, 4, 2, 4, 2).swapaxes(2, 3).reshape(3, 4, 32)
    )  # nn.Conv, VALID, of stride 4
    x = patches @ w["patch"] + w["patch_bias"]
    row, column = (at.reshape(-1, 1) * 10_000.0 ** -(np.arange(3) / 2) for at in np.mgrid[:2, :2])
    x = x + np.concatenate(
        [np.sin(column), np.cos(column), np.sin(row), np.cos(row)], axis=1
    )  # posemb_sincos_2d
    for i in range(2):  # Encoder1DBlock
        y, a = norm(x, "block.attention_norm", i), "block.attention"
        # A bias of keys, which theirs has, adds to all of a query's logits alike.
        q, v = (
            np.einsum("btd,dhn->bthn", y, w[f"{a}.{n}"][i]) + w[f"{a}.{n}_bias"][i]
            for n in ("query", "value")
        )
        k = np.einsum("btd,dhn->bthn", y, w[f"{a}.key"][i]) + random.standard_normal((3, 4))
        logits = np.einsum("bthn,bshn->bhts", q, k) / 2
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        y = np.einsum("bhts,bshn->bthn", weights / weights.sum(-1, keepdims=True), v)
        x = x + np.einsum("bthn,hnd->btd", y, w[f"{a}.out"][i]) + w[f"{a}.out_bias"][i]
        y = norm(x, "block.mlp_norm", i) @ w["block.mlp.up"][i] + w["block.mlp.up_bias"][i]
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ w["block.mlp.down"][i] + w["block.mlp.down_bias"][i]
    x = norm(x, "norm").mean(axis=1)
    expected = (
        np.tanh(x @ w["pre_logits"] + w["pre_logits_bias"]) @ w["readout"] + w["readout_bias"]
    )
    np.testing.assert_allclose(model(jnp.asarray(images, jnp.float32)), expected, atol=2e-5)
    assert (
        np.abs(x @ w["readout"] + w["readout_bias"] - expected).max() > 0.1
    )  # the control: without the layer before the head
    at_base = preset_of(RUN)
    assert at_base.logit_scale(MODEL.sizes()) == pytest.approx(64**-0.5)
    assert at_base.residual_scale(MODEL.sizes(), 0, "mlp") == (1, 1)


def test_the_start_and_the_rates_of_every_parameter() -> None:
    """Deviations are those of the initializers in models/vit.py; rates and decay are one for all (optax.py)."""
    preset, sizes = preset_of(RUN), MODEL.sizes()
    for name, spec in MODEL.parameters().items():
        scales = preset.scales(spec, sizes, "adam", RUN.optimizer.decay)
        fan_in, fan_out = (
            math.prod(sizes[axis] for axis in axes) for axes in (spec.fan_in, spec.fan_out)
        )
        glorot = math.sqrt(2 / (fan_in + fan_out))  # xavier_uniform: attention, MlpBlock
        lecun = fan_in**-0.5  # of nn.Conv and nn.Dense
        start = {"patch": lecun, "pre_logits": lecun, "readout": 0.0}.get(
            name, glorot
        )  # head_zeroinit
        numbers = [
            np.asarray(x).flat
            for x in (
                scales.init_std,
                scales.multiplier,
                scales.lr,
                scales.eps,
                scales.weight_decay,
            )
        ]
        std, multiplier, lr, eps, decay = (float(x[0]) for x in numbers)
        if spec.fan_in:
            assert std * multiplier == pytest.approx(start, rel=1e-5), name
            assert multiplier == pytest.approx(1, rel=1e-5), name
            # xavier_uniform in blocks; nn.Conv's and nn.Dense's lecun_normal is cut at two deviations
            assert spec.distribution == ("uniform" if spec.in_block else "truncated"), name
        else:
            assert std == (1 if name.endswith("gain") else 0), name
        assert (lr, eps) == (1, 1), name
        assert decay == (1 if spec.fan_in else 0), name  # optax.py: wd_mults, '.*/kernel$'


def test_the_optimizer_and_its_schedule() -> None:
    opt = RUN.optimizer
    assert OPTIMIZERS[opt.name].family == "adam"  # optax_name='scale_by_adam'
    assert (opt.b1, opt.b2, opt.eps) == (0.9, 0.999, 1e-8)  # defaults of optax.scale_by_adam
    assert opt.moment_dtype == "bfloat16"  # optax=dict(mu_dtype='bfloat16')
    assert (opt.peak_lr, opt.weight_decay) == (0.001, 0.0001)  # lr, wd
    assert (
        opt.decay == "independent"
    )  # optax.py: the chain adds wd * w after lr and before the schedule
    assert opt.clip_norm == 1.0  # grad_clip_norm
    assert (opt.schedule, opt.warmup_steps, opt.final_lr_fraction) == (
        "cosine",
        10_000,
        0,
    )  # schedule
    assert RUN.data.batch_size == 1024  # input.batch_size
    assert RUN.data.train_percent == 99  # split='train[:99%]'
    train_images = round(0.99 * 1_281_167)
    assert RUN.steps == round(90 * train_images / 1024)  # total_epochs; utils.py: steps


def test_the_rate_of_every_step() -> None:
    """utils.py, create_learning_rate_schedule: a cosine of what follows warm-up, times min(1, step / warmup_steps), steps from 0."""
    step, warmup = np.arange(RUN.steps), 10_000
    progress = np.clip((step - warmup) / (RUN.steps - warmup), 0, 1)
    expected = 0.5 * (1 + np.cos(np.pi * progress)) * np.minimum(1, step / warmup)
    np.testing.assert_allclose(
        schedule_table(RUN.optimizer, RUN.steps), expected, rtol=1e-5, atol=1e-7
    )
    before = dataclasses.replace(
        RUN.optimizer, warmup_from_zero=False
    )  # the control: a step further in warm-up
    assert np.abs(schedule_table(before, RUN.steps) - expected).max() == pytest.approx(
        1 / warmup, rel=1e-3
    )


def test_what_images_go_through() -> None:
    data = RUN.data
    assert data.name == "imagenet2012"
    assert data.transforms.crop == "inception"  # decode_jpeg_and_inception_crop(224)|flip_lr
    assert (data.transforms.randaug_layers, data.transforms.randaug_magnitude) == (
        2,
        10,
    )  # randaug(2,10)
    assert data.transforms.mixup == 0.2  # mixup=dict(p=0.2)
    assert (
        data.transforms.mix_group == data.batch_size // 8
    )  # train.py: by shard_map on every device, of a TPU v3-8
    assert (data.transforms.cutmix, data.transforms.label_smoothing, data.transforms.repeats) == (
        0,
        0,
        1,
    )
    # pp_eval: resize_small(256), by area (pp/ops_image.py), then central_crop(224)
    assert (data.pixels.fit, data.pixels.resize, data.pixels.interpolation) == ("edge", 256, "area")
    assert (data.pixels.mean, data.pixels.std) == ((0.5,), (0.5,))  # value_range(-1, 1)


def test_the_larger_model_has_the_same_numbers() -> None:
    larger = vit_b16_imagenet()
    assert (larger.data, larger.optimizer, larger.preset, larger.steps) == (
        RUN.data,
        RUN.optimizer,
        RUN.preset,
        RUN.steps,
    )
