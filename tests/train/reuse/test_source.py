"""`mupax import` and `export`, and weights that they wrote: runs, steps, folders, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.preset import PresetConfig, preset_for
from mupax.train.core.factors import resolve
from mupax.train.data.text import named_tokenizers, tokenizer
from mupax.train.reuse import plain, trained, transplant
from mupax.train.reuse.source import WeightsError
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.config import from_huggingface
from mupax.zoo.huggingface.tensorfile import Tensors, write_tensors
from tests.train.checkpoints.test_assets import of_an_older_version
from tests.train.reuse.commands import call, change_json, read_json, refuse, succeed
from tests.train.reuse.random_weights import LLAMA, published

pytestmark = pytest.mark.core

TIED = DecoderConfig(
    width=12, depth=2, num_heads=2, mlp_ratio=1.5, vocab_size=17, seq_len=7, tied=True
)
SP = PresetConfig(name="sp")
MUP = PresetConfig(name="mup", base="lm-proxy")
RUN = (
    "train lm-tiny --data.name text:text.txt --model.width 32 --model.depth 1 --model.num-heads 2 "
    "--model.seq-len 16 --data.batch-size 16 --data.eval-examples 16 --data.eval-batch-size 16 "
    "--checkpoint.every-steps 2 --log.no-samples --steps 3 --workdir run"
)


def loaded(path: Path, model: DecoderConfig, config: PresetConfig) -> dict[str, np.ndarray]:
    """Return weights as a model under a preset stores them."""
    built = definition(model)
    return transplant.place(trained.read(path), built, resolve(preset_for(config, model), built))


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_allclose(actual[name], value, rtol=5e-7, err_msg=name)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    files = Tensors(folder)
    return {name: files.read(name) for name in files.shapes}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A published model."""
    return published(tmp_path / "hf")


# Import


def test_import_writes_weights_in_the_presets_form(origin: Path, tmp_path: Path) -> None:
    result = succeed("import", origin, "--preset mup --base lm-proxy --out", tmp_path / "in")
    assert not result.err
    assert "decoder: width 12, depth 2" in result.out
    assert "under mup" in result.out
    record = read_json(tmp_path, "in", "model.json")
    assert record["preset"]["fields"] == {"name": "mup", "base": "lm-proxy"}
    assert record["model"]["family"] == "decoder"
    scales = record["preset"]["scales"]
    assert scales["block.attention.query"] != 1
    tensors = tensors_of(tmp_path / "in")
    expected = trained.read(origin).params
    scales = {name: np.asarray(scale, np.float32) for name, scale in scales.items()}
    absorbed = plain.absorb_multipliers(tensors, scales)
    assert_same({name: absorbed[name] for name in expected}, expected)
    assert_same(loaded(tmp_path / "in", LLAMA, MUP), {name: tensors[name] for name in expected})


def test_imported_weights_are_loaded_into_any_preset(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", TIED)
    imported = tmp_path / "in"
    succeed("import", origin, "--preset mup --form mean-field --out", imported)
    for preset in (SP, MUP, PresetConfig(name="depth-mup", gamma0=0.25)):
        assert_same(loaded(imported, TIED, preset), loaded(origin, TIED, preset))
    expected = loaded(origin, TIED, MUP)
    assert_same(loaded(imported / "model.safetensors", TIED, MUP), expected)
    # The control: another preset stores other values.
    query = "block.attention.query"
    assert not np.allclose(expected[query], loaded(origin, TIED, SP)[query])


def test_parameters_come_in_the_models_type(origin: Path) -> None:
    compute = dataclasses.replace(LLAMA.compute, param_dtype="bfloat16")
    params = loaded(origin, dataclasses.replace(LLAMA, compute=compute), MUP)
    assert {value.dtype for value in params.values()} == {jnp.dtype("bfloat16")}


def test_a_classifier_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = {
        "model_type": "vit",
        "hidden_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 12,
        "image_size": 6,
        "patch_size": 3,
        "num_labels": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = from_huggingface(config).model
    shapes = {name: leaf.shape for name, leaf in definition(model).abstract.items()}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors = dict(weights.to_huggingface(model, params))
    tensors = {name: w for name, w in tensors.items() if not name.startswith("classifier")}
    tensors["vit.pooler.dense.weight"] = np.ones((6, 6), np.float32)
    write_tensors(tmp_path, tensors.items())
    out = succeed("import", tmp_path, "--out", tmp_path / "in").out
    assert "not read, and read by no model here: pooler.dense.weight" in out
    assert "not in the file, so zero: readout, readout_bias" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 16}, r"block.attention.key is \(2, 12, 2, 6\) and the model's \(2, 16, 2, 8\)"),
        ({"bias": True}, "block.attention.key_bias is missing"),
        ({"tied": True}, "readout is .* has none"),
    ],
)
def test_weights_of_another_model_are_refused(
    origin: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        loaded(origin, dataclasses.replace(LLAMA, **change), MUP)


# Export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir of three steps under mup at twice its base's width, with checkpoints 2 and 3."""
    folder = tmp_path_factory.mktemp("export")
    choose = random.Random(0)
    words = ("def", "return", "import", "class", "self", "value")
    lines = [" ".join(choose.choices(words, k=9)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        succeed(RUN)
    return folder / "run"


def test_a_run_is_exported_and_comes_back(run: Path, tmp_path: Path) -> None:
    result = succeed("export", run, "--out", tmp_path / "hf")
    assert not result.err
    assert "folded from mup" in result.out
    assert "tokens are bytes" in result.out
    config = read_json(tmp_path, "hf", "config.json")
    assert config["model_type"] == "llama"
    assert config["eos_token_id"] == 0
    record = config["mupax"]
    assert record["step"] == 3
    assert record["fields"] == {"name": "mup", "base": "lm-proxy"}
    query_scale = record["factors"]["logits"] * 16**0.5
    assert record["scales"]["block.attention.query"] == pytest.approx(query_scale)
    source = trained.read(run)
    assert isinstance(source.model, DecoderConfig)
    preset = PresetConfig(**record["fields"])
    assert_same(loaded(tmp_path / "hf", source.model, preset), source.stored)
    assert_same(loaded(run, source.model, preset), source.stored)
    # The control: another step has other weights.
    earlier = loaded(run / "checkpoints" / "2", source.model, preset)
    assert np.abs(earlier["token"] - source.stored["token"]).max() > 1e-4


def test_a_source_has_the_logits_of_its_preset(run: Path) -> None:
    source = trained.read(run)
    assert source.run is not None
    built = definition(source.model)
    preset = preset_for(source.run[0].preset, source.model)
    assert source.logits == plain.logits_of(built, resolve(preset, built))
    # The control: without a preset they are others.
    assert source.logits != built.sizes["head_dim"] ** -0.5


def test_a_step_can_be_named_in_either_way(run: Path, tmp_path: Path) -> None:
    succeed("export", run, "--step 2 --dtype bfloat16 --out", tmp_path / "a")
    succeed("export", run / "checkpoints" / "2", "--dtype bfloat16 --out", tmp_path / "b")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    assert read_json(tmp_path, "a", "config.json")["dtype"] == "bfloat16"


def test_an_imported_folder_is_exported_as_it_was(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", TIED)
    succeed("import", origin, "--preset depth-mup --base lm-proxy --out", tmp_path / "in")
    succeed("export", tmp_path / "in", "--out", tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), tensors_of(origin))


@pytest.mark.parametrize("preset", ["u-mup", "mup"])
def test_folded_skips_are_said_to_be_inexact(preset: str, origin: Path, tmp_path: Path) -> None:
    out = succeed("import", origin, "--preset", preset, "--out", tmp_path / "in").out
    assert ("exact but for the norms' eps" in out) == (preset == "u-mup")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_by_their_parameter(
    origin: Path, tmp_path: Path, value: float
) -> None:
    tensors = tensors_of(origin)
    name = next(name for name in tensors if "embed_tokens" in name)
    tensors[name][3, 1] = value
    (origin / "model.safetensors").unlink()
    write_tensors(origin, tensors.items(), metadata={"format": "pt"})
    code, _, err = call("import", origin, "--out", tmp_path / "in")
    assert code == 2
    assert "token (1 of " in err
    assert not (tmp_path / "in").exists()


def save_tokenizer(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    named_tokenizers.train_bpe([text], 270).save(str(path))


def test_a_tokenizer_goes_with_the_model(origin: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path, b"a few words, a few more")
    out = tmp_path / "out"
    succeed("export", origin, "--tokenizer", path, "--out", out)
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
    assert read_json(out, "tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    separator = tokenizer.Subwords(path).separator
    assert read_json(out, "config.json")["eos_token_id"] == separator


def test_the_tokenizer_of_a_run_is_the_one_that_made_its_tokens(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the key that the run recorded, wherever the text that trained it is."""
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "tokenizers"
    mine = folder / "bpe270-text-b.json"
    save_tokenizer(folder / "bpe270-text-a.json", b"other words, of other texts")
    save_tokenizer(mine, b"a few words, a few more")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    of_an_older_version(copy)
    record = read_json(copy, "config.json")
    record["config"]["data"]["tokenizer"] = "bpe:270"
    record["data"]["tokenizer"] = tokenizer.Subwords(mine).key
    (copy / "config.json").write_text(json.dumps(record))
    succeed("export", copy, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == mine.read_bytes()
    mine.unlink()
    out = succeed("export", copy, "--out", tmp_path / "again").out
    assert "bpe:270 was not found on this machine; give its file as --tokenizer FILE" in out
    assert not (tmp_path / "again" / "tokenizer.json").exists()


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("import hf --out hf", "is not an empty folder"),
        ("import none --out new", "no run and no weights there"),
        ("import hf", "--out"),
        ("import hf --out new --preset mu", "did you mean 'mup'"),
        ("import hf --out new --preset mup --base vit-proxy", "is a vit"),
        ("import hf --out new --gamma0 2", "takes"),
        ("export run --step 9 --out new", "no checkpoint of step 9"),
        ("export run --steps 9 --out new", "no flag is named --steps; did you mean --step?"),
        ("export other --out new", "no checkpoint yet"),
        ("export damaged --out new", "is damaged: _CHECKPOINT_METADATA is missing"),
    ],
)
def test_wrong_words_are_answered(
    words: str, message: str, origin: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(origin.parent)
    Path("run").symlink_to(run)
    config = read_json("run/config.json")["config"]
    config["model"]["norm"] = "layernorm"
    Path("other").mkdir()
    shutil.copy("run/config.json", "other")
    change_json(Path("other/config.json"), config=config)
    shutil.copytree(run, "damaged")
    shutil.rmtree("damaged/checkpoints/3/state")
    Path("damaged/checkpoints/3/_CHECKPOINT_METADATA").unlink()
    assert message in refuse(words)
    assert not Path("new").exists()


def test_help_names_both_commands() -> None:
    assert re.findall(r"^  (import|export) ", call("--help").out, re.M) == ["import", "export"]
    for command in ("import", "export"):
        assert "--out FOLDER" in call(command, "--help").out
