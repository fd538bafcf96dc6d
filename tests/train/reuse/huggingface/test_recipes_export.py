"""Every recipe's result is exported, or refused by the fields that have no layout."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config import cli
from mupax.train.config.preset import PresetConfig, preset_for
from mupax.train.config.recipes import RECIPES
from mupax.train.core.factors import init_stds, resolve
from mupax.train.reuse import plain, trained, transplant
from mupax.train.reuse.huggingface import files
from mupax.zoo.configs import ConfigError
from mupax.zoo.definition import definition
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface.equivalent import equivalent
from mupax.zoo.transformer import RoutingConfig, TransformerConfig, transformer
from mupax.zoo.vit.sines import sines
from scripts.parity import __main__ as parity
from scripts.parity import models
from tests.train.reuse.random_weights import source_of
from tests.train.reuse.scaled_models import forward_program

pytestmark = pytest.mark.core

FAMILIES = {
    "gpt2-c4": "gpt2",
    **dict.fromkeys(("vit-digits", "vit-endless", "vit-fashion"), "siglip"),
    **dict.fromkeys(("vit-b16-imagenet", "vit-h14"), "siglip"),
    **dict.fromkeys(("lm-laptop", "lm-tiny", "lm-1b", "lm-8b"), "llama"),
    "lm-30b-a3b": "qwen3_moe",
    **dict.fromkeys(("bart-large-c4", "r2c2-c4"), "mbart"),
}
"""Recipes whose result is exported, and as what."""

CENTERED = (
    "model.centered trains the difference of two networks, and a file holds one; "
    "train with --model.no-centered to export"
)
REFUSED = {
    "ed-tiny": [
        (
            "--model.positions learned --model.norm layernorm",
            "transformers' mbart cannot hold this model: it has no rotary positions; "
            "train with --model.positions learned --model.norm layernorm, which is an MBart, or "
            "with --model.positions relative --model.norm rmsnorm --model.no-embedding-norm, which "
            "is a T5, to export; it has LayerNorm, which subtracts the mean, and model.norm is "
            "rmsnorm",
        ),
        ("--model.positions relative --model.norm rmsnorm --model.no-embedding-norm", ""),
    ],
    "vit-s16-imagenet": [
        (
            "--model.no-pre-logits",
            "transformers' siglip cannot hold this model: model.pre_logits is a layer before the "
            "readout, which it does not have; train with --model.no-pre-logits to export",
        )
    ],
    "bordelon-vit": [
        ("--model.no-centered", f"transformers' siglip cannot hold this model: {CENTERED}")
    ],
    "bordelon-lm": [
        (
            "--model.no-centered --model.no-qk-norm --model.qk-norm-kind rmsnorm "
            "--model.branch-activation none --model.no-readout-bias",
            f"transformers' gpt2 cannot hold this model: {CENTERED}; "
            "model.qk_norm normalizes queries and keys, which it does not; "
            "train with --model.no-qk-norm --model.qk-norm-kind rmsnorm to export; "
            "model.branch_activation acts on what branches read, which it does not; "
            "train with --model.branch-activation none to export; "
            "model.readout_bias adds to the logits, which it does not; "
            "train with --model.no-readout-bias to export",
        )
    ],
}
"""Recipes whose result has no layout.

Each row has flags that the refusal names, with which the result has a layout, and the refusal.
"""


def written(name: str, *words: str) -> dict[str, Any]:
    model = cli.parse(name, RECIPES[name], list(words)).config.model
    return huggingface.to_huggingface(equivalent(transformer(model, "export")).model)


def test_every_recipe_is_listed_once() -> None:
    assert sorted([*FAMILIES, *REFUSED]) == sorted(RECIPES), (
        "say of a new recipe what its result is exported as"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_recipe_is_exported(name: str) -> None:
    assert written(name)["model_type"] == FAMILIES[name]


@pytest.mark.parametrize(
    ("name", "flags", "text"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_recipe_is_refused_and_the_flags_of_the_refusal_export(
    name: str, flags: str, text: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        written(name)
    assert text in ("", str(refusal.value))
    assert all(flag in str(refusal.value) for flag in re.findall(r"--\S+", flags))
    assert written(name, *flags.split())["model_type"] in ("mbart", "t5", "siglip", "gpt2")


@pytest.mark.parametrize("preset", ["sp", "mup", "depth-mup", "u-mup"])
@pytest.mark.parametrize("name", models.WRITTEN)
def test_what_is_written_as_another_model_has_the_same_logits(
    name: str, preset: str, tmp_path: Path
) -> None:
    config = models.WRITTEN[name]
    built = definition(config)
    fields = parity.PRESETS[preset]
    if preset in ("mup", "depth-mup"):
        fields = dataclasses.replace(fields, base=parity.BASES[config.family])
    resolved = preset_for(fields, config)
    factors = resolve(resolved, built, resolved.optimizers[0])
    params = parity.random_params(built, init_stds(resolved, built))
    inputs = [jnp.asarray(array) for array in parity.inputs_of(config)]
    expected = forward_program(config)(params, factors.multiplier, factors.forward, *inputs)
    assert np.abs(expected).max() > 0.1

    folded = plain.absorb_multipliers(params, plain.scales(built, factors))
    record = plain.preset_record(fields, resolved, built, factors)
    weights = source_of(config, folded, preset=record)
    notes = files.write_huggingface(weights, tmp_path / "out", "float32")
    assert len(notes) == 1
    field = "model.sincos" if "positions" in name else "model.routing.capacity_factor"
    assert notes[0].startswith(field)

    exported = trained.read(tmp_path / "out")
    assert exported.model == equivalent(config).model != config
    standard_model = definition(exported.model)
    standard = resolve(preset_for(PresetConfig(name="sp"), exported.model), standard_model)
    values: Any = transplant.place(exported, standard_model, standard)

    def logits(**changes: np.ndarray) -> np.ndarray:
        program = forward_program(exported.model)
        return program({**values, **changes}, standard.multiplier, standard.forward, *inputs)

    np.testing.assert_allclose(logits(), expected, atol=1e-4)
    if "position" in values and config.family == "vit":  # the control: another table
        moved = np.roll(values["position"], 1, axis=0)
        assert np.abs(logits(position=moved) - expected).max() > 1e-3


def test_positions_in_the_file_are_the_fixed_table(tmp_path: Path) -> None:
    config = models.WRITTEN["ViT, fixed positions"]
    model, params, _ = equivalent(config)
    assert not getattr(model, "sincos", True)
    np.testing.assert_array_equal(params["position"], sines(config))  # pyright: ignore[reportArgumentType]
    assert not params["position"][0].any(), "the CLS token has no position"


@pytest.mark.parametrize(
    "model", [models.VIT, models.LLAMA, models.VARIANTS["Qwen3-MoE"], models.T5]
)
def test_a_model_that_a_layout_holds_is_written_as_it_is(model: TransformerConfig) -> None:
    assert equivalent(model) == (model, {}, [])


def test_a_capacity_beside_what_no_layout_has_is_still_refused() -> None:
    routing = RoutingConfig(gate="sigmoid", capacity_factor=1.25)
    model = dataclasses.replace(models.VARIANTS["Qwen3-MoE"], routing=routing)
    with pytest.raises(
        ConfigError, match=r"its router is a softmax, and model\.routing\.gate is sigmoid"
    ):
        huggingface.to_huggingface(equivalent(model).model)
