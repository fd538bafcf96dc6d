"""Logits and greedy text of equal weights, here and in `transformers` (`make parity`)."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.preset import PresetConfig, preset_for
from mupax.train.core.factors import init_stds, resolve
from mupax.train.reuse import plain, source, trained, transplant
from mupax.train.reuse.huggingface import files
from mupax.zoo.configs import CONFIGS, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.huggingface import config as huggingface
from scripts.parity import __main__ as parity
from scripts.parity import models
from tests.fixtures import generate_uncached

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} not installed; `make parity` does it"
    ),
]

TOLERANCE = 1e-4
"""Of a logit, float32; the logits are of order one to twenty."""


@pytest.fixture(autouse=True)
def quiet() -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()


def presets_in_turn() -> list[tuple[str, str, str]]:
    """Every model both ways under mup and depth-mup, and once each under the others: enough here, all in the table."""
    models_by_preset = {
        "u-mup": ("GPT-2, untied", "Llama, untied", "ViT"),
        "mup, mean-field form": ("Llama, tied", "MBart, untied"),
        "sp": ("ViT",),
    }
    return [
        case
        for case in parity.cases()
        if case[2] in ("mup", "depth-mup") or case[0] in models_by_preset[case[2]]
    ]


@pytest.mark.parametrize("case", presets_in_turn(), ids=", ".join)
def test_logits_agree(case: tuple[str, str, str], tmp_path: Path) -> None:
    row = parity.measure(*case, tmp_path)
    assert row.largest > 0.1, "the logits are too small to compare"
    assert row.difference < TOLERANCE


@pytest.mark.parametrize("preset", ["sp", "mup", "depth-mup"])
@pytest.mark.parametrize("model", models.WRITTEN)
def test_logits_of_what_is_written_as_another_model_agree(
    model: str, preset: str, tmp_path: Path
) -> None:
    row = parity.measure(model, "out", preset, tmp_path)
    assert row.largest > 0.1, "the logits are too small to compare"
    assert row.difference < TOLERANCE


@pytest.mark.parametrize("name", ["block.attention.query", "block.mlp.down", "readout"])
def test_control_without_folding_logits_differ(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = plain.scales

    def without(*arguments: Any) -> Any:
        return {**scales(*arguments), name: np.ones(())}

    monkeypatch.setattr(plain, "scales", without)
    assert (
        parity.measure("Llama, untied", "out", "depth-mup", tmp_path).difference > 100 * TOLERANCE
    )


SANDWICH = dataclasses.replace(
    CONFIGS["lm-proxy"], activation="geglu", post_norm=True, window=16, full_every=2, attention_softcap=2.0,
    logit_softcap=5.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "preset"), [("lm-tiny", "mup"), ("lm-tiny", "depth-mup"), ("gemma2", "depth-mup")]
)
def test_greedy_text_is_the_same(model: Any, preset: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = CONFIGS.get(model, SANDWICH)
    preset_config = PresetConfig(name=preset, base="lm-proxy")
    model = dataclasses.replace(model, width=96, num_heads=6) if model is SANDWICH else model
    assert isinstance(model, DecoderConfig)
    built = definition(model)
    parameterization = preset_for(preset_config, model)
    factors = resolve(parameterization, built)
    params = parity.random_params(built, init_stds(parameterization, built))
    folded = plain.absorb_multipliers(params, plain.scales(built, factors))
    record = plain.preset_record(preset_config, parameterization, built, factors)
    files.write_huggingface(
        source.WeightsSource(model, folded, dict.fromkeys(folded, np.ones(())), record, []),
        tmp_path / "hf",
        "float32",
    )

    prompt = np.frombuffer(b"def __init__(self, ", np.uint8).astype(np.int32)
    length = 100
    forward = jax.jit(built.apply)

    def logits(tokens: np.ndarray) -> Any:
        return forward(params, factors.multiplier, factors.forward, jnp.asarray(tokens))

    ours = generate_uncached.sample(logits, prompt, length, seq_len=model.seq_len, temperature=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.from_numpy(prompt[None].astype(np.int64))
    output_ids = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
    )
    np.testing.assert_array_equal(output_ids[0].numpy(), ours)
    assert len(set(ours[len(prompt) :].tolist())) > 10, (
        "the text repeats one token, which proves little"
    )
    assert theirs.config.mupax["described"] == parameterization.describe()


@pytest.mark.parametrize("name", ["MBart, tied", "T5", "T5 v1.1"])
def test_greedy_text_of_an_encoder_decoder_is_the_same(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSeq2SeqLM

    # MBart's own generation counts the encoder's layers for the decoder's.
    model = dataclasses.replace(models.MODELS[name], encoder_depth=3)
    preset_config = PresetConfig(name="depth-mup", base="ed-proxy")
    built = definition(model)
    parameterization = preset_for(preset_config, model)
    factors = resolve(parameterization, built)
    params = parity.random_params(built, init_stds(parameterization, built))
    params |= {
        name: 16 * params[name] for name in ("block.cross.out", "block.mlp.down")
    }  # else a token predicts itself
    folded = plain.absorb_multipliers(params, plain.scales(built, factors))
    ids = {"bos_token_id": 3, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 2}
    files.write_huggingface(
        source.WeightsSource(model, folded, dict.fromkeys(folded, np.ones(())), {}, []),
        tmp_path / "hf",
        "float32",
        ids,
    )
    inputs, mask, targets = parity.inputs_of(model)
    text = np.full_like(targets, 2)
    forward = jax.jit(built.apply)
    for t in range(targets.shape[1] - 1):
        logits = forward(
            params, factors.multiplier, factors.forward, *map(jnp.asarray, (inputs, mask, text))
        )
        text[:, t + 1] = np.argmax(logits[:, t], axis=-1)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").generate(
        torch.from_numpy(inputs.astype(np.int64)), attention_mask=torch.from_numpy(mask.astype(np.int64)),
        max_new_tokens=text.shape[1] - 1, do_sample=False, num_beams=1,
    )  # fmt: skip
    np.testing.assert_array_equal(theirs.numpy(), text)
    assert len(np.unique(text)) > 4, "the text repeats one token, which proves little"


@pytest.mark.parametrize(("name", "last"), [("Gemma 2", "query"), ("Gemma 3", "query_norm.gain")])
def test_queries_that_their_code_scales_are_read(name: str, last: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        **huggingface.to_huggingface(models.MODELS[name]),
        "query_pre_attn_scalar": 3,
    }  # of heads of 10
    settings = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    read = trained.read(tmp_path)
    inputs = parity.inputs_of(models.GEMMA)
    built = definition(read.model)
    factors = resolve(preset_for(PresetConfig(name="sp"), read.model), built)
    params = transplant.place(read, built, factors)
    theirs = parity.transformers_logits(tmp_path, *inputs)
    for times, close in ((1, True), ((3 / 10) ** 0.5, False)):  # the control: as the file has them
        queries = {f"block.attention.{last}": times * params[f"block.attention.{last}"]}
        ours = built.apply(
            {**params, **queries}, factors.multiplier, factors.forward, *map(jnp.asarray, inputs)
        )
        assert (np.abs(ours - theirs).max() < TOLERANCE) == close
    assert np.abs(theirs).max() > 0.1


def test_embeddings_that_their_code_scales_are_read(tmp_path: Path) -> None:
    from transformers import MBartConfig, MBartForConditionalGeneration

    fields = huggingface.to_huggingface(models.MBART)
    settings = MBartConfig(**{**fields, "scale_embedding": True})
    MBartForConditionalGeneration(settings).save_pretrained(tmp_path)
    read = trained.read(tmp_path)
    inputs = parity.inputs_of(models.MBART)
    built = definition(read.model)
    factors = resolve(preset_for(PresetConfig(name="sp"), read.model), built)
    params = transplant.place(read, built, factors)
    ours = jax.jit(built.apply)(
        params, factors.multiplier, factors.forward, *map(jnp.asarray, inputs)
    )
    theirs = parity.transformers_logits(tmp_path, *inputs)
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    assert np.abs(theirs).max() > 0.1


def test_transformers_reads_parts_and_halves(tmp_path: Path) -> None:
    """Files of its own making, in parts and in bfloat16, are read here; ours in parts are read there."""
    import torch
    from transformers import AutoModelForCausalLM

    from mupax.zoo.huggingface import weights
    from mupax.zoo.huggingface.tensorfile import INDEX, Tensors, write_tensors

    config = dataclasses.replace(models.LLAMA, num_kv_heads=2)
    parity.random_transformers(config, tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half", max_shard_size="20KB")
    assert (tmp_path / "half" / INDEX).is_file()
    complete, half = (trained.read(tmp_path / name).params for name in ("one", "half"))
    for name, value in complete.items():
        np.testing.assert_array_equal(half[name], value.astype(jnp.bfloat16).astype(np.float32))
    (tmp_path / "parts").mkdir()
    write_tensors(
        tmp_path / "parts",
        weights.to_huggingface(config, complete),
        metadata={"format": "pt"},
        shard_bytes=20_000,
    )
    (tmp_path / "parts" / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    assert len(Tensors(tmp_path / "parts").shapes) > 5
    (tokens,) = parity.inputs_of(config)
    np.testing.assert_array_equal(
        parity.transformers_logits(tmp_path / "parts", tokens),
        parity.transformers_logits(tmp_path / "one", tokens),
    )
