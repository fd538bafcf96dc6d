"""Recipes that repeat runs of the papers whose parameterizations are tested here."""

from __future__ import annotations

import math

from mupax.train.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.zoo import configs


def bordelon_vit() -> Config:
    """Train the vision transformer of Bordelon et al. 2024 on CIFAR-5M, with SGD in one pass.

    The run is that of figures 6 and 8-10, in the absolute form.

    Cost: about 4e15 FLOPs, 4.8 M images. Needs CIFAR-5M's `part0.npz` to `part5.npz` in
    `--data.data-dir`. Without them, `--data.name shapes` takes the endless images instead, which
    need a larger learning rate.

    Expect loss curves that are nearly equal as `--model.head-dim` or `--model.num-heads` (with
    `--model.width`) grows, and slower early at large depth. As in the authors' code, embeddings,
    positions and readout learn at beta0 times the rule's rate, queries and keys have a further
    factor of 2^-1/2, and the epsilon of norms is 1e-6.
    """
    beta0 = 4.0
    root = math.sqrt(0.5)
    rates = []
    # In the authors' code these three groups learn at beta0 times the rule's learning rate.
    for group in ("patch_embedding", "position", "readout"):
        rates.append(f"rates.{group}={beta0:g}")
    # Both factors of 2^-1/2 together halve the attention logits.
    multipliers = [f"multipliers.{group}={root!r}" for group in ("query", "key")]
    return Config(
        recipe="bordelon-vit",
        model=configs.get("bordelon-vit"),
        data=DataConfig(
            name="cifar5m", batch_size=64, eval_batch_size=250, eval_examples=10_000, augment=False
        ),
        preset=PresetConfig(
            name="depth-mup",
            base=None,
            alpha_a=1.0,
            alpha_l=1.0,
            gamma0=0.1,
            beta0=beta0,
            constants=(*rates, *multipliers),
        ),
        optimizer=OptimizerConfig(name="sgd", peak_lr=0.2, momentum=0.9, schedule="constant"),
        log=LogConfig(eval_every_steps=2500),
        checkpoint=CheckpointConfig(every_steps=2500),
        steps=75_000,
    )


def bordelon_lm() -> Config:
    """Train the decoder of Bordelon et al. 2024 on C4, with Adam and without weight decay.

    The run is that of figures 7 and 12, in the absolute form.

    Cost: about 9e15 FLOPs, 330 M tokens, nearly all of it in the vocabulary. Streams C4 from the
    hub (`pip install 'mupax[hf]'`). Without a network, `--data.name records:FOLDER --data.stream`
    reads its json.gz files (docs/howto/data.md).

    Expect lower loss at equal steps as heads, head dimension or depth grow. The model is that of
    the authors' code: GELU before each branch, LayerNorm without a gain on queries and keys, and a
    bias inside the readout's multiplier. The paper states neither learning rate nor batch size (its
    code: rates of 0.005 to 0.05, batches of 128 to 256). It uses GPT-2's tokens: give that
    tokenizer.json as `--data.tokenizer` to compare losses. The code's warm-up begins at 0, one step
    later than ours.
    """
    return Config(
        recipe="bordelon-lm",
        model=configs.get("bordelon-lm"),
        data=DataConfig(
            name="hf:allenai/c4:en", batch_size=128, eval_examples=4096, tokenizer="bpe:50257"
        ),
        preset=PresetConfig(
            name="depth-mup",
            base=None,
            alpha_a=1.0,
            alpha_l=1.0,
            gamma0=0.25,
            beta0=4.0,
            # The authors' readout multiplier falls with width and also multiplies the bias. Here
            # the bias has no such multiplier, so its learning rate falls with width instead.
            constants=("readout_bias_width=-1",),
        ),
        # The authors' code has this eps. In practice it is too small to change an update.
        optimizer=OptimizerConfig(name="adam", peak_lr=0.01, b2=0.999, eps=1e-20, warmup_steps=100),
        log=LogConfig(eval_every_steps=1000),
        checkpoint=CheckpointConfig(every_steps=1000),
        steps=10_000,
    )
