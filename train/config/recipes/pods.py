"""Recipes for accelerators, from one chip to a pod."""

from __future__ import annotations

import dataclasses

from mupax.train.config.data import PixelsConfig, TransformsConfig
from mupax.train.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.zoo import configs
from mupax.zoo.configs import ComputeConfig, ModelConfig
from mupax.zoo.families import Remat


def vit_s16_imagenet() -> Config:
    """Train ViT-S/16 on ImageNet-1k for 90 epochs, as big_vision's vit_s16_i1k.

    Cost: about 3e18 FLOPs. Needs imagenet2012 prepared by TFDS in `--data.data-dir`.

    Expect about 76.5 %, which big_vision reaches (Beyer et al. 2022, arXiv 2205.01580); no run of
    this recipe is on record here. Its values are those of big_vision/configs/vit_s16_i1k.py
    (`tests/train/config/recipes/test_imagenet.py` has each beside its source), and
    docs/evidence/small_runs.md lists the differences. The model is the base of its preset. Files of
    transformers have no place for the layer before its readout: train with `--model.no-pre-logits`,
    as the paper has it, to export.
    """
    config = _vit_i1k("vit-s16-imagenet", "vit-s16")
    model = dataclasses.replace(config.model, pre_logits=True)  # pyright: ignore
    return dataclasses.replace(config, model=model)


def vit_b16_imagenet() -> Config:
    """Train ViT-B/16 on ImageNet-1k for 90 epochs, with the rates of ViT-S/16 moved by mup.

    Cost: about four times vit-s16-imagenet. Needs imagenet2012 prepared by TFDS in
    `--data.data-dir`.

    Expect a higher accuracy than that of vit-s16-imagenet with the same flags. Tune on S/16 and
    keep the flags.
    """
    return _vit_i1k("vit-b16-imagenet", "vit-b16")


def gpt2_c4() -> Config:
    """Train GPT-2 (124 M) on 10 B tokens of C4, at the base size of its preset.

    Cost: about 8e18 FLOPs. Streams C4 from the hub (`pip install 'mupax[hf]'`). Without a network,
    `--data.name records:FOLDER --data.stream` reads its json.gz files (docs/howto/data.md). Give
    GPT-2's tokenizer.json as `--data.tokenizer` to compare losses. Peak learning rate, weight decay
    and batch size are those of nanoGPT's reproduction of GPT-2.

    Expect larger models to do better with the same flags: `--model gpt2-medium` keeps the rates
    through the preset.
    """
    return Config(
        recipe="gpt2-c4",
        model=_model("gpt2", "dots"),
        data=DataConfig(
            name="hf:allenai/c4:en", batch_size=512, eval_examples=8192, tokenizer="bpe:50257"
        ),
        preset=PresetConfig(name="mup", base="gpt2"),
        optimizer=OptimizerConfig(
            peak_lr=6e-4, weight_decay=0.1, warmup_steps=700, final_lr_fraction=0.1, clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=1000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=20_000,  # 20,000 x 512 sequences x 1,024 tokens are 10 B tokens
    )


def vit_h14() -> Config:
    """Train ViT-H/14 on ImageNet-1k for 90 epochs on a pod, with the rates of ViT-S/16.

    Cost: about 1e20 FLOPs. Fits TPU v5e:4x4 (`mupax compile vit-h14 --topology v5e:4x4`). Needs
    imagenet2012 prepared by TFDS in `--data.data-dir`. mup carries the rates over.

    Expect it to overfit ImageNet-1k without stronger augmentation (Beyer et al. 2022 stop at
    smaller models). The recipe is for scaling, not for accuracy.
    """
    return dataclasses.replace(
        _imagenet("vit-h14", "vit-h14"), model=_model("vit-h14", "block"), mesh=_SHARDED
    )


def lm_1b() -> Config:
    """Train a decoder of 1.2 B parameters on 25 B tokens of C4 on a pod.

    Cost: about 2e20 FLOPs. Fits TPU v5e:8x8 (`mupax compile lm-1b --topology v5e:8x8`). Streams C4
    as gpt2-c4 does. Tokens are 20 per parameter (Hoffmann et al. 2022). The model is the base of
    its preset.

    Expect nothing yet: no run of it is on record here.
    """
    # 24,000 steps x 512 sequences x 2,048 tokens are 25 B tokens.
    return _pod_lm("lm-1b", batch_size=512, steps=24_000)


def lm_8b() -> Config:
    """Train a decoder of 8 B parameters, in Llama 3's shape, on 160 B tokens of C4 on a pod.

    Cost: about 8e21 FLOPs. Fits TPU v5p:4x4x4, v5e:16x16 and v6e:16x16 (`mupax compile lm-8b
    --topology v5e:16x16`). Streams C4 as gpt2-c4 does. Tokens are 20 per parameter (Hoffmann et al.
    2022). mup carries the rates of lm-1b over.

    Expect nothing yet: no run of it is on record here.
    """
    # 76,000 steps x 256 sequences x 8,192 tokens are 160 B tokens.
    return _pod_lm("lm-8b", batch_size=256, steps=76_000)


def lm_30b_a3b() -> Config:
    """Train a mixture of experts, 30 B parameters and 3 B active, on 67 B tokens of C4 on a pod.

    Cost: about 2e21 FLOPs. Fits TPU v5e:16x16 and v5p:4x4x4 (`mupax compile lm-30b-a3b --topology
    v5e:16x16`). Streams C4 as gpt2-c4 does. The shape is that of Qwen3-30B-A3B. Tokens are 20 per
    active parameter. An expert takes at most 1.25 times its even share of an example;
    `--model.routing.capacity-factor None` drops no token. mup, which has rules for experts, carries
    the rates of lm-1b over.

    Expect nothing yet: no run of it is on record here.
    """
    # 64,000 steps x 256 sequences x 4,096 tokens are 67 B tokens.
    config = _pod_lm("lm-30b-a3b", batch_size=256, steps=64_000)
    return dataclasses.replace(config, mesh=dataclasses.replace(_SHARDED, experts=8))


def bart_large_c4() -> Config:
    """Train a pre-norm BART-large on C4 under ntk, as Dinan, Yaida and Zhang 2023.

    Cost: about 1e20 FLOPs, 200,000 steps of 512 texts. Streams C4 as gpt2-c4 does. 30 % of the text
    is cut out. Give GPT-2's tokenizer.json as `--data.tokenizer` to compare losses (the paper's
    text is another).

    Expect about 0.97 nats per target, as the paper's figures 3 and 4 have on its own text. Rates
    are those of the paper's neural tangent run (its 32.768 as a base rate at width 1024). The
    paper's dropout of 0.1 is left out.
    """
    return _dinan("bart-large-c4", "bart-large", steps=200_000)


def r2c2_c4() -> Config:
    """Train R2C2 (2.7 B) on C4 under ntk on a pod, as Dinan, Yaida and Zhang 2023.

    Cost: about 5e19 FLOPs, 15,000 steps of 512 texts. Streams C4 as gpt2-c4 does. 30 % of the text
    is cut out. Give GPT-2's tokenizer.json as `--data.tokenizer` to compare losses (the paper's
    text is another).

    Expect about 1.14 nats per target after these steps, where BART-large has 1.20 (the paper's
    figure 5, on its own text). The preset carries the rates of bart-large-c4 over.
    """
    return _dinan("r2c2-c4", "r2c2", steps=15_000)


def _dinan(name: str, model: str, steps: int) -> Config:
    """Return the config of a run of Dinan, Yaida and Zhang 2023 on C4, sharded by fsdp.

    Args:
        name: Name of the recipe, such as `r2c2-c4`.
        model: Name of an encoder-decoder of the zoo, such as `r2c2`.
    """
    data = DataConfig(
        name="hf:allenai/c4:en",
        batch_size=512,
        eval_examples=8192,
        tokenizer="bpe:50260",
        noise="infilling",
    )
    return Config(
        recipe=name,
        model=_model(model, "block"),
        data=data,
        preset=PresetConfig(name="ntk", base="bart-large"),
        optimizer=OptimizerConfig(
            peak_lr=1e-3,
            b2=0.998,
            eps=1e-6,
            weight_decay=0.01,
            warmup_steps=5000,
            schedule="linear",
            clip_norm=0.1,
        ),
        mesh=_SHARDED,
        log=LogConfig(eval_every_steps=5000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=steps,
    )


_I1K_CONSTANTS = (
    "stds.mlp_in=0.632456",
    "stds.mlp_out=1.264911",
    "stds.patch_embedding=0.0360844",
    "multipliers.patch_embedding=27.7128",
)
"""Constants with which the preset starts from big_vision's initialization.

The standard deviations of the MLP are Glorot's, (2 / (fan_in + fan_out))^1/2, divided by the
preset's fan_in^-1/2, for an MLP four times as wide as the model. The preset would put the factor
768^-1/2 of the patch embedding into its multiplier. Here this factor is in the weight, as in
big_vision, so that learning rate, eps and gradient clipping act on the weight as they do there."""


def _vit_i1k(name: str, model: str) -> Config:
    """Return the config of a ViT on ImageNet-1k as in big_vision.

    Augmentation, initialization, moments in bfloat16 and 90 epochs are those of big_vision.

    Args:
        name: Name of the recipe, such as `vit-s16-imagenet`.
        model: Name of a ViT of the zoo, such as `vit-s16`.
    """
    base = _imagenet(name, model)
    fields = {"sincos": True, "norm_eps": 1e-6, "distribution": "flax"}
    # mix_group: big_vision mixes images within each of a TPU v3-8's 8 devices: 1,024 / 8 = 128.
    transforms = TransformsConfig(
        crop="inception", randaug_layers=2, randaug_magnitude=10, mixup=0.2, mix_group=128
    )
    pixels = PixelsConfig(fit="edge", resize=256, interpolation="area")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, **fields),
        # big_vision's split is train[:99%]. It validates on the last percent.
        data=dataclasses.replace(base.data, transforms=transforms, pixels=pixels, train_percent=99),
        preset=PresetConfig(
            name="mup", base="vit-s16", zero_readout=True, constants=_I1K_CONSTANTS
        ),
        # big_vision sets mu_dtype="bfloat16", and its warm-up begins at 0.
        optimizer=dataclasses.replace(
            base.optimizer, moment_dtype="bfloat16", warmup_from_zero=True
        ),
        # 90 epochs of 99 % of the 1,281,167 training images.
        steps=111_477,
    )


def _imagenet(name: str, model: str) -> Config:
    """Return the config of a ViT on ImageNet-1k, 90 epochs with the rates of ViT-S/16.

    Args:
        name: Name of the recipe, such as `vit-s16-imagenet`.
        model: Name of a ViT of the zoo, such as `vit-s16`.
    """
    return Config(
        recipe=name,
        model=_model(model, "dots"),
        data=DataConfig(name="imagenet2012", batch_size=1024),
        preset=PresetConfig(name="mup", base="vit-s16"),
        optimizer=OptimizerConfig(
            peak_lr=1e-3,
            b2=0.999,
            weight_decay=1e-4,
            # big_vision adds wd * w after scaling by the peak learning rate and before the
            # schedule, so the decay does not depend on the peak.
            decay="independent",
            warmup_steps=10_000,
            clip_norm=1.0,
        ),
        # An epoch is 1,251 whole batches. Evaluations are 5 epochs apart, and the run has 90.
        log=LogConfig(eval_every_steps=6_255),
        checkpoint=CheckpointConfig(every_steps=2_500),
        steps=112_590,
    )


def _pod_lm(name: str, batch_size: int, steps: int) -> Config:
    """Return the config of a decoder on C4, sharded by fsdp over a pod, with the rates of lm-1b.

    Args:
        name: Name of both the recipe and its model in the zoo, such as `lm-8b`.
    """
    model = _model(name, "block")
    tokenizer = f"bpe:{model.sizes()['vocab']}"
    return Config(
        recipe=name,
        model=model,
        data=DataConfig(
            name="hf:allenai/c4:en", batch_size=batch_size, eval_examples=8192, tokenizer=tokenizer
        ),
        preset=PresetConfig(name="mup", base="lm-1b"),
        optimizer=OptimizerConfig(
            peak_lr=3e-4, weight_decay=0.1, warmup_steps=2000, final_lr_fraction=0.1, clip_norm=1.0
        ),
        mesh=_SHARDED,
        log=LogConfig(eval_every_steps=5000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=steps,
    )


def _model(name: str, remat: Remat) -> ModelConfig:
    """Return a model of the zoo that computes in bfloat16, with a remat policy."""
    return dataclasses.replace(
        configs.get(name), compute=ComputeConfig(dtype="bfloat16", remat=remat)
    )


_SHARDED = MeshConfig(data=1, fsdp=-1)
"""Mesh that splits parameters and optimizer state over all chips."""
