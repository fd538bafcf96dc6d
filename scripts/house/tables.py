"""Digests of `Preset.scales` for every preset, over models, forms, bases, constants, optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, get_args

from mupax import presets
from mupax.presets import PRESETS, Form, PresetError
from mupax.presets.optimizers import Family
from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from scripts.house.digests import digest

MODELS: dict[str, ModelConfig] = {
    "decoder": DecoderConfig(
        width=96,
        depth=5,
        num_heads=6,
        num_kv_heads=2,
        mlp_ratio=2,
        vocab_size=40,
        seq_len=8,
        qk_norm=True,
    ),
    "experts": DecoderConfig(
        width=96, depth=5, num_heads=6, mlp_ratio=2, vocab_size=40, seq_len=8, tied=True, experts=4
    ),
    "vit": ViTConfig(
        width=40,
        depth=3,
        num_heads=5,
        mlp_ratio=1.3,
        image_size=9,
        patch_size=3,
        channels=2,
        num_classes=7,
    ),
    "encoder-decoder": EncoderDecoderConfig(
        width=96, depth=3, num_heads=6, mlp_ratio=2, vocab_size=40, seq_len=8, positions="relative"
    ),
}
BASE = {"embed": 24, "heads": 3, "kv_heads": 1, "head_dim": 8, "mlp": 48, "layers": 2}
CONSTANTS = {
    "rates.query": 2.5,
    "decays.mlp_in": 0,
    "stds.readout": 0.3,
    "multipliers.token_embedding": 1.7,
}
OPTIMIZERS: tuple[Family, ...] = get_args(Family)


def record() -> dict[str, Any]:
    """Return a digest of `lines` for each preset, form and model, by their names joined by `/`."""
    cases = itertools.product(sorted(PRESETS), (None, *get_args(Form)), MODELS)
    digests = {}
    for name, form, model in cases:
        digests[f"{name}/{form or 'own form'}/{model}"] = digest(list(lines(name, form, model)))
    return digests


def lines(name: str, form: Form | None, model_name: str) -> Iterator[str]:
    """Yield a line with the scales of each parameter in each case, or with the error's message.

    Cases are all combinations of base, constants, optimizer and kind of weight decay.

    Args:
        form: Form of the preset; its own if `None`.
        model_name: Key of `MODELS`.
    """
    model = MODELS[model_name]
    bases = (None, BASE)
    for base, constants, optimizer in itertools.product(bases, ({}, CONSTANTS), OPTIMIZERS):
        case = f"base {base is not None}, constants {bool(constants)}, {optimizer}"
        try:
            preset = presets.get(name, form=form, base=base, **constants)
        except PresetError as error:
            yield f"{case}: {error}"
            continue
        for decay in ("coupled", "independent"):
            for parameter, spec in model.parameters().items():
                try:
                    scales = repr(preset.scales(spec, model.sizes(), optimizer, decay))
                except PresetError as error:
                    scales = str(error)
                yield f"{case}, {decay}, {parameter}: {scales}"
