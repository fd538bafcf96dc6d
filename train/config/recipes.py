"""Runs as functions: a recipe returns a complete config. Its docstring says what it is, what it costs, what to expect.

`python -m train RECIPE` runs one; any field can be changed by a flag of its name. A recipe of your own is a function
here and a line in `RECIPES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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


def lm_tiny() -> Config:
    """A byte-level decoder on the sources of Python's standard library, under mup.

    Cost: a few minutes on two CPU cores. Needs no download: every machine with Python has the text.
    Expect a validation loss of about 1.30 nats per byte; on the same text count models reach 1.79 (trigram) and 1.39 (4-gram).
    """
    return Config(
        recipe="lm-tiny",
        model=configs.get("lm-tiny"),
        data=DataConfig(name="python_corpus", batch_size=16, eval_batch_size=64, eval_examples=1024),
        preset=PresetConfig(name="mup", base="lm-proxy"),
        optimizer=OptimizerConfig(peak_lr=8e-3, warmup_steps=50, weight_decay=3e-4, decay="independent", clip_norm=1.0),
        log=LogConfig(eval_every_steps=200),
        checkpoint=CheckpointConfig(every_steps=200),
        steps=800,
    )


def vit_digits() -> Config:
    """A vision transformer on scikit-learn's real handwritten digits, under mup.

    Cost: under two minutes on two CPU cores. Needs no download: the images come with scikit-learn.
    Expect a test accuracy of 98.5 to 99 % on the random split (logistic regression: 96.9 %), and about 96 % with
    `--data.split writer`, which tests on writers never seen in training (logistic regression: 90.8 %).
    """
    return Config(
        recipe="vit-digits",
        model=configs.get("vit-tiny"),
        data=DataConfig(name="digits", batch_size=64),
        preset=PresetConfig(name="mup", base="vit-proxy"),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup_steps=50, weight_decay=3e-4, decay="independent", clip_norm=1.0),
        log=LogConfig(eval_every_steps=500),
        checkpoint=CheckpointConfig(every_steps=500),
        steps=2000,
    )


def vit_tiny() -> Config:
    """The run of vit-digits, under the name of its model.

    Cost and expected result: those of vit-digits.
    """
    return dataclasses.replace(vit_digits(), recipe="vit-tiny")


def vit_endless() -> Config:
    """A vision transformer on images that never repeat, striped shapes in clutter drawn as they are asked for, under mup.

    Cost: a few minutes on two CPU cores. Needs no download. One pass: training and validation loss are the same thing.
    Expect a validation accuracy of about 53 % where logistic regression has 16 % and chance 10 %: first the stripes are
    found, which is a loss of 1.6 nats, then in part the shapes, down to 1.0 (`docs/shapes.json`, by
    `python -m scripts.bench.shapes`). SGD takes a rate of its own. `bordelon-vit` is the run on CIFAR-5M.
    """
    model = configs.get("vit-tiny")
    return Config(
        recipe="vit-endless",
        model=dataclasses.replace(model, width=128, num_heads=8, image_size=32, patch_size=8, channels=3),
        data=DataConfig(name="shapes", batch_size=64, eval_batch_size=250, eval_examples=5000),
        preset=PresetConfig(name="mup", base="embed=64,head_dim=16,heads=4,kv_heads=4,mlp=256,layers=4"),
        optimizer=OptimizerConfig(peak_lr=2e-3, warmup_steps=50, weight_decay=3e-4, decay="independent", clip_norm=1.0),
        log=LogConfig(eval_every_steps=500),
        checkpoint=CheckpointConfig(every_steps=500),
        steps=2000,
    )


def bordelon_vit() -> Config:
    """Bordelon et al. 2024, figures 6, 8-10: a vision transformer on CIFAR-5M in one pass, SGD, absolute form.

    Cost: about 4e15 FLOPs, 4.8 M images. Needs CIFAR-5M's `part0.npz` to `part5.npz` in `--data.data-dir`; without them
    the endless set stands in with `--data.name shapes`, which needs a larger rate.
    Expect loss curves nearly equal as `--model.head-dim` or `--model.num-heads` (with `--model.width`) grows, slower
    early at large depth. The authors' code also gives the embeddings, positions and readout beta0 times the rule and
    divides queries and keys by a further root of two; those constants are not set here.
    """
    return Config(
        recipe="bordelon-vit",
        model=configs.get("bordelon-vit"),
        data=DataConfig(name="cifar5m", batch_size=64, eval_batch_size=250, eval_examples=10_000, augment=False),
        preset=PresetConfig(name="depth-mup", base=None, alpha_a=1.0, alpha_l=1.0, gamma0=0.1, beta0=4.0),
        optimizer=OptimizerConfig(name="sgd", peak_lr=0.2, momentum=0.9, schedule="constant"),
        log=LogConfig(eval_every_steps=2500),
        checkpoint=CheckpointConfig(every_steps=2500),
        steps=75_000,
    )


def bordelon_lm() -> Config:
    """Bordelon et al. 2024, figures 7 and 12: a decoder on C4, Adam without decay, absolute form.

    Cost: about 9e15 FLOPs, 330 M tokens, nearly all of it in the vocabulary. Needs C4 prepared by TFDS in
    `--data.data-dir`.
    Expect lower loss at equal steps as heads, head dimension or depth grow. The paper states neither rate nor batch
    (its code: rates of 0.005 to 0.05, batches of 128 to 256) and uses GPT-2's tokens: give that tokenizer.json as
    `--data.tokenizer` to compare losses.
    """
    return Config(
        recipe="bordelon-lm",
        model=configs.get("bordelon-lm"),
        data=DataConfig(name="c4", batch_size=128, eval_examples=4096, tokenizer="bpe:50257"),
        preset=PresetConfig(name="depth-mup", base=None, alpha_a=1.0, alpha_l=1.0, gamma0=0.25, beta0=4.0),
        optimizer=OptimizerConfig(name="adam", peak_lr=0.01, b2=0.999, eps=1e-20, warmup_steps=100),
        log=LogConfig(eval_every_steps=1000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=10_000,
    )


def _imagenet(name: str, model: str) -> Config:
    return Config(
        recipe=name,
        model=_fast(configs.get(model)),
        data=DataConfig(name="imagenet2012", batch_size=1024),
        preset=PresetConfig(name="mup", base="vit-s16"),
        optimizer=OptimizerConfig(
            peak_lr=1e-3, b2=0.999, weight_decay=1e-4, decay="independent", warmup_steps=10_000, clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=6_255),
        checkpoint=CheckpointConfig(every_steps=2_500),
        steps=112_590,
    )


def vit_s16_imagenet() -> Config:
    """ViT-S/16 on ImageNet-1k for 90 epochs, at the base size of its preset.

    Cost: about 3e18 FLOPs. Needs imagenet2012 prepared by TFDS in `--data.data-dir`.
    Rate, decay, batch and schedule of Beyer et al. 2022 (arXiv 2205.01580), who reach 76.5 % with RandAugment and mixup;
    with the light augmentation here expect less.
    """
    return _imagenet("vit-s16-imagenet", "vit-s16")


def vit_b16_imagenet() -> Config:
    """ViT-B/16 on ImageNet-1k for 90 epochs, with the rates of ViT-S/16 carried over by mup.

    Cost: about four times vit-s16-imagenet. Needs imagenet2012 prepared by TFDS in `--data.data-dir`.
    Expect more than vit-s16-imagenet with the same flags; tune on S/16 and keep them.
    """
    return _imagenet("vit-b16-imagenet", "vit-b16")


def gpt2_c4() -> Config:
    """GPT-2 (124 M) on 10 B tokens of C4, at the base size of its preset.

    Cost: about 8e18 FLOPs. Needs C4 prepared by TFDS in `--data.data-dir`; give GPT-2's tokenizer.json as
    `--data.tokenizer` to compare losses. Peak rate, decay and batch as in nanoGPT's reproduction of GPT-2.
    Expect larger models to do better with the same flags: `--model gpt2-medium` keeps the rates through the preset.
    """
    return Config(
        recipe="gpt2-c4",
        model=_fast(configs.get("gpt2")),
        data=DataConfig(name="c4", batch_size=512, eval_examples=8192, tokenizer="bpe:50257"),
        preset=PresetConfig(name="mup", base="gpt2"),
        optimizer=OptimizerConfig(
            peak_lr=6e-4, weight_decay=0.1, warmup_steps=700, final_lr_fraction=0.1, clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=1000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=20_000,
    )


def vit_h14() -> Config:
    """ViT-H/14 on ImageNet-1k for 90 epochs, with the rates of ViT-S/16 carried over by mup; made for a pod.

    Cost: about 1e20 FLOPs; fits TPU v5e:4x4 (`python -m train compile vit-h14 --topology v5e:4x4`). Needs imagenet2012
    prepared by TFDS in `--data.data-dir`.
    Expect it to overfit ImageNet-1k without stronger augmentation (Beyer et al. 2022 stop at smaller models): it is here
    to be scaled, not for its accuracy.
    """
    config = _imagenet("vit-h14", "vit-h14")
    model = dataclasses.replace(config.model, compute=ComputeConfig(dtype="bfloat16", remat="block"))
    return dataclasses.replace(config, model=model, mesh=_SHARDED)


def _pod_lm(name: str, batch_size: int, steps: int) -> Config:
    return Config(
        recipe=name,
        model=dataclasses.replace(configs.get(name), compute=ComputeConfig(dtype="bfloat16", remat="block")),
        data=DataConfig(name="c4", batch_size=batch_size, eval_examples=8192, tokenizer="bpe:128256"),
        preset=PresetConfig(name="mup", base="lm-1b"),
        optimizer=OptimizerConfig(
            peak_lr=3e-4, weight_decay=0.1, warmup_steps=2000, final_lr_fraction=0.1, clip_norm=1.0
        ),
        mesh=_SHARDED,
        log=LogConfig(eval_every_steps=5000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=steps,
    )


def lm_1b() -> Config:
    """A 1.2 B decoder on 25 B tokens of C4, at the base size of its preset; made for a pod.

    Cost: about 2e20 FLOPs; fits TPU v5e:8x8 (`python -m train compile lm-1b --topology v5e:8x8`). Needs C4 prepared by
    TFDS in `--data.data-dir`. Tokens are 20 per parameter (Hoffmann et al. 2022).
    Expect nothing yet: no run of it is on record here.
    """
    return _pod_lm("lm-1b", batch_size=512, steps=24_000)


def lm_8b() -> Config:
    """An 8 B decoder of Llama 3's shape on 160 B tokens of C4, with the rates of lm-1b carried over by mup; for a pod.

    Cost: about 8e21 FLOPs; fits TPU v5p:4x4x4, v5e:16x16 and v6e:16x16 (`python -m train compile lm-8b --topology
    v5e:16x16`). Needs C4 prepared by TFDS in `--data.data-dir`. Tokens are 20 per parameter (Hoffmann et al. 2022).
    Expect nothing yet: no run of it is on record here.
    """
    return _pod_lm("lm-8b", batch_size=256, steps=76_000)


def _fast(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, compute=ComputeConfig(dtype="bfloat16", remat="dots"))


_SHARDED = MeshConfig(data=1, fsdp=-1)
"""Parameters and optimizer state over every chip there is."""


RECIPES: dict[str, Callable[[], Config]] = {
    "lm-tiny": lm_tiny,
    "vit-tiny": vit_tiny,
    "vit-digits": vit_digits,
    "vit-endless": vit_endless,
    "bordelon-vit": bordelon_vit,
    "bordelon-lm": bordelon_lm,
    "vit-s16-imagenet": vit_s16_imagenet,
    "vit-b16-imagenet": vit_b16_imagenet,
    "gpt2-c4": gpt2_c4,
    "vit-h14": vit_h14,
    "lm-1b": lm_1b,
    "lm-8b": lm_8b,
}
"""Name to recipe. The name is the first word after `python -m train`."""
