"""Recipes: functions that return the complete config of a run.

`mupax train RECIPE` runs one, and a flag changes the field of its name. The docstring says what is
trained, what it costs and what to expect. Its first line is printed by `mupax train --help`, the
rest by `mupax train RECIPE --help`. A new recipe is a function in a file of this folder and a line
in `RECIPES`.

The recipes of this file are for any machine. They take minutes on two CPU cores.
"""

from __future__ import annotations

import dataclasses

from mupax.mappings import LazyRegistry
from mupax.train.config.preset import PresetConfig
from mupax.train.config.run import CheckpointConfig, Config, DataConfig, LogConfig, OptimizerConfig
from mupax.zoo import configs


def lm_laptop() -> Config:
    """Train a small byte-level decoder under mup and Muon, for the least loss in two minutes.

    Cost: two minutes on two CPU cores. Needs no download: the text is Python's standard library,
    which every machine with Python has. `make train` runs this recipe.

    Expect a validation loss of about 1.15 nats per byte. Count models reach 1.79 (trigram) and 1.39
    (4-gram) on the same text. Learning rates, constants, decay and schedule are those of the tuned
    preset `mup:lm-laptop-v2`, which was tuned at half the depth.
    """
    return Config(
        recipe="lm-laptop",
        model=dataclasses.replace(configs.get("lm-proxy"), depth=4),
        data=DataConfig(name="python_corpus", batch_size=8, eval_batch_size=64, eval_examples=1024),
        # These constants were searched together with both learning rates. At half the depth and on
        # ten other seeds, the loss is 0.029 nats below that of mup:lm-laptop-v1 (95 % interval:
        # 0.020 to 0.037).
        preset=PresetConfig(
            name="mup",
            base="lm-proxy",
            constants=(
                "c_a=0.25",
                "rates.token_embedding=26.9087",
                "rates.readout=2.48372",
                "stds.token_embedding=0.478802",
                "stds.readout=4",
            ),
        ),
        optimizer=OptimizerConfig(
            name="muon",
            peak_lr=0.0552387,
            adam_lr=0.0150595,
            # The search had 62 warm-up steps of 1,250, the same share.
            warmup_steps=248,
            weight_decay=3e-4,
            decay="independent",
            clip_norm=1.0,
        ),
        log=LogConfig(eval_every_steps=1000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=5000,
    )


def lm_tiny() -> Config:
    """Train a byte-level decoder on Python's standard library, under mup and AdamW.

    Cost: a few minutes on two CPU cores. Needs no download: every machine with Python has the text.
    Studies start from this recipe.

    Expect a validation loss of about 1.30 nats per byte. Count models reach 1.79 (trigram) and 1.39
    (4-gram) on the same text.
    """
    return Config(
        recipe="lm-tiny",
        model=configs.get("lm-tiny"),
        data=DataConfig(
            name="python_corpus", batch_size=16, eval_batch_size=64, eval_examples=1024
        ),
        preset=PresetConfig(name="mup", base="lm-proxy"),
        optimizer=OptimizerConfig(
            peak_lr=8e-3, warmup_steps=50, weight_decay=3e-4, decay="independent", clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=200),
        checkpoint=CheckpointConfig(every_steps=200),
        steps=800,
    )


def ed_tiny() -> Config:
    """Train a byte-level encoder-decoder to fill in cut spans (BART), under mup.

    Cost: a few minutes on two CPU cores. Needs no download: the text is Python's standard library,
    which every machine with Python has.

    Expect a validation loss of about 0.70 nats per target token. The targets are all of the text,
    also what can be copied from the input. Copying, with a 4-gram of the targets where there is
    nothing to copy, reaches 1.00; the 4-gram alone reaches 1.53.
    """
    return Config(
        recipe="ed-tiny",
        model=configs.get("ed-tiny"),
        data=DataConfig(
            name="python_corpus",
            batch_size=32,
            eval_batch_size=64,
            eval_examples=512,
            noise="infilling",
        ),
        preset=PresetConfig(name="mup", base="ed-proxy"),
        optimizer=OptimizerConfig(
            peak_lr=8e-3, warmup_steps=100, weight_decay=3e-4, decay="independent", clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=250),
        checkpoint=CheckpointConfig(every_steps=250),
        steps=1000,
    )


def vit_digits() -> Config:
    """Train a vision transformer on real handwritten digits, under mup.

    Cost: under two minutes on two CPU cores. Needs no download: the images come with mupax.

    Expect a test accuracy of 98.5 to 99 % on the random split (logistic regression: 96.9 %), and
    about 96 % with `--data.split writer`, which tests on writers never seen in training (logistic
    regression: 90.8 %).
    """
    return Config(
        recipe="vit-digits",
        model=configs.get("vit-tiny"),
        data=DataConfig(name="digits", batch_size=64),
        preset=PresetConfig(name="mup", base="vit-proxy"),
        optimizer=OptimizerConfig(
            peak_lr=3e-3, warmup_steps=50, weight_decay=3e-4, decay="independent", clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=500),
        checkpoint=CheckpointConfig(every_steps=500),
        steps=2000,
    )


def vit_endless() -> Config:
    """Train a vision transformer on endless images of striped shapes in clutter, under mup.

    Cost: a few minutes on two CPU cores. Needs no download: images are drawn as they are asked for.
    There is one pass, so training and validation loss are the same thing.

    Expect a validation accuracy of about 51 % (logistic regression: 16 %, chance: 10 %). The model
    first learns the stripes, at a loss of 1.6 nats, then part of the shapes, down to 1.0. With
    constants tuned at half the width and depth, and depth-mup's branches, it reaches 84 %
    (docs/evidence/small_runs.md). `docs/evidence/shapes.json` says how hard and how fast the images
    are. SGD needs a learning rate of its own. `bordelon-vit` is the run on CIFAR-5M.
    """
    model = configs.get("vit-tiny")
    return Config(
        recipe="vit-endless",
        model=dataclasses.replace(
            model, width=128, num_heads=8, image_size=32, patch_size=8, channels=3
        ),
        data=DataConfig(name="shapes", batch_size=64, eval_batch_size=250, eval_examples=5000),
        preset=PresetConfig(
            name="mup", base="embed=64,head_dim=16,heads=4,kv_heads=4,mlp=256,layers=4"
        ),
        optimizer=OptimizerConfig(
            peak_lr=2e-3, warmup_steps=50, weight_decay=3e-4, decay="independent", clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=500),
        checkpoint=CheckpointConfig(every_steps=500),
        steps=2000,
    )


def vit_fashion() -> Config:
    """Train a vision transformer on Fashion-MNIST, 60,000 photographs of clothes, under mup.

    Cost: a few minutes on two CPU cores. Needs the files of `apt-get install dataset-fashion-mnist`
    on Debian or Ubuntu, or `--data.name idx:FOLDER` with the same four IDX files from elsewhere.

    Expect a test accuracy of 87.6 % in ten classes. `--data.augment` shifts images by up to 4
    pixels and mirrors them. That is too much for so few epochs: 80.0 %.
    """
    model = dataclasses.replace(configs.get("vit-tiny"), image_size=28, patch_size=7)
    return Config(
        recipe="vit-fashion",
        model=model,
        # With augmentation the test accuracy is 80.0 % in place of 87.6 %: the run has only two
        # epochs.
        data=DataConfig(name="fashion", batch_size=64, eval_batch_size=200, augment=False),
        preset=PresetConfig(name="mup", base="vit-proxy"),
        optimizer=OptimizerConfig(
            peak_lr=3e-3, warmup_steps=50, weight_decay=3e-4, decay="independent", clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=500),
        checkpoint=CheckpointConfig(every_steps=500),
        steps=2000,
    )


def _import_papers():
    from mupax.train.config.recipes import papers

    return papers


def _import_pods():
    from mupax.train.config.recipes import pods

    return pods


RECIPES: LazyRegistry[[], Config] = LazyRegistry(
    {
        "lm-laptop": lambda: lm_laptop,
        "lm-tiny": lambda: lm_tiny,
        "vit-digits": lambda: vit_digits,
        "vit-endless": lambda: vit_endless,
        "vit-fashion": lambda: vit_fashion,
        "ed-tiny": lambda: ed_tiny,
        "bordelon-vit": lambda: _import_papers().bordelon_vit,
        "bordelon-lm": lambda: _import_papers().bordelon_lm,
        "vit-s16-imagenet": lambda: _import_pods().vit_s16_imagenet,
        "vit-b16-imagenet": lambda: _import_pods().vit_b16_imagenet,
        "gpt2-c4": lambda: _import_pods().gpt2_c4,
        "vit-h14": lambda: _import_pods().vit_h14,
        "lm-1b": lambda: _import_pods().lm_1b,
        "lm-8b": lambda: _import_pods().lm_8b,
        "lm-30b-a3b": lambda: _import_pods().lm_30b_a3b,
        "bart-large-c4": lambda: _import_pods().bart_large_c4,
        "r2c2-c4": lambda: _import_pods().r2c2_c4,
    }
)
"""Name of a recipe, which is the first word after `mupax train`, to its function."""
