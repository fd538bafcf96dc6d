"""`mupax import` and `export`, and loading what they wrote: runs, steps, folders, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.config.preset import PresetConfig, preset_for
from mupax.train.core.factors import resolve
from mupax.train.reuse import source as pretrained
from mupax.train.reuse import trained, transplant
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.config import to_huggingface
from mupax.zoo.huggingface.tensorfile import Tensors, write_tensors
from tests.train.checkpoints.test_assets import of_an_older_version

pytestmark = pytest.mark.core

MODEL = DecoderConfig(
    width=12, depth=2, num_heads=2, mlp_ratio=1.5, vocab_size=17, seq_len=7,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False,
)  # fmt: skip
TIED = DecoderConfig(
    width=12, depth=2, num_heads=2, mlp_ratio=1.5, vocab_size=17, seq_len=7, tied=True
)
MUP = PresetConfig(name="mup", base="lm-proxy")
RUN = (
    "lm-tiny --data.name text:text.txt --model.width 32 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-examples 16 --data.eval-batch-size 16 --checkpoint.every-steps 2 --log.no-samples --steps 3 --workdir run"
)


def published(folder: Path, model: DecoderConfig = MODEL, seed: int = 0) -> Path:
    """A model of random weights as it is published."""
    draw = np.random.default_rng(seed)
    params = {
        name: draw.standard_normal(leaf.shape, np.float32)
        for name, leaf in definition(model).abstract.items()
    }
    folder.mkdir()
    write_tensors(folder, weights.to_huggingface(model, params), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_huggingface(model)))
    return folder


def zoo(*words: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def loaded(path: Path, model: DecoderConfig, config: PresetConfig) -> dict[str, np.ndarray]:
    preset, built = preset_for(config, model), definition(model)
    return transplant.place(trained.read(path), built, resolve(preset, built))


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_allclose(actual[name], value, rtol=5e-7, err_msg=name)


# Import


def test_import_writes_weights_in_the_presets_form(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf")
    code, out, err = zoo(
        "import", origin, "--out", tmp_path / "in", "--preset", "mup", "--base", "lm-proxy"
    )
    assert (code, err) == (0, "")
    assert "decoder: width 12, depth 2" in out
    assert "under mup" in out
    record = json.loads((tmp_path / "in" / "model.json").read_text())
    assert record["preset"]["fields"] == {"name": "mup", "base": "lm-proxy"}
    assert record["model"]["family"] == "decoder"
    files, plain = Tensors(tmp_path / "in"), trained.read(origin).params
    for name in plain:
        scale = np.asarray(record["preset"]["scales"][name], np.float32).reshape(
            -1, *[1] * (plain[name].ndim - 1)
        )
        np.testing.assert_allclose(files.read(name) * scale, plain[name], rtol=5e-7, err_msg=name)
    assert record["preset"]["scales"]["block.attention.query"] != 1
    assert_same(loaded(tmp_path / "in", MODEL, MUP), {name: files.read(name) for name in plain})


def test_imported_weights_are_loaded_into_any_preset(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", TIED)
    assert (
        zoo("import", origin, "--out", tmp_path / "in", "--preset", "mup", "--form", "mean-field")[
            0
        ]
        == 0
    )
    for preset in (PresetConfig(name="sp"), MUP, PresetConfig(name="depth-mup", gamma0=0.25)):
        assert_same(loaded(tmp_path / "in", TIED, preset), loaded(origin, TIED, preset))
    file = tmp_path / "in" / "model.safetensors"
    assert_same(loaded(file, TIED, MUP), loaded(origin, TIED, MUP))
    # Control: another preset's numbers are others.
    assert not np.allclose(
        loaded(origin, TIED, MUP)["token"],
        loaded(origin, TIED, PresetConfig(name="sp"))["norm.gain"][0],
    )


def test_parameters_come_in_the_models_type(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf")
    half = dataclasses.replace(
        MODEL, compute=dataclasses.replace(MODEL.compute, param_dtype="bfloat16")
    )
    assert {value.dtype for value in loaded(origin, half, MUP).values()} == {jnp.dtype("bfloat16")}


def test_a_classifier_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = {
        "model_type": "vit",
        "hidden_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
    }
    config |= {"intermediate_size": 12, "image_size": 6, "patch_size": 3, "num_labels": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from mupax.zoo.huggingface.config import from_huggingface

    model = from_huggingface(config).model
    params = {
        name: np.ones(leaf.shape, np.float32) for name, leaf in definition(model).abstract.items()
    }
    tensors = [
        (n, w) for n, w in weights.to_huggingface(model, params) if not n.startswith("classifier")
    ]
    write_tensors(tmp_path, [*tensors, ("vit.pooler.dense.weight", np.ones((6, 6), np.float32))])
    code, out, _ = zoo("import", tmp_path, "--out", tmp_path / "in")
    assert code == 0
    assert "not read, and read by no model here: pooler.dense.weight" in out
    assert "not in the file, so zero: readout, readout_bias" in out


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf")
    for change, message in (
        ({"width": 16}, r"block.attention.key is \(2, 12, 2, 6\) and the model's \(2, 16, 2, 8\)"),
        ({"bias": True}, "block.attention.key_bias is missing"),
        ({"tied": True}, "readout is .* has none"),
    ):
        with pytest.raises(pretrained.WeightsError, match=message):
            loaded(origin, dataclasses.replace(MODEL, **change), MUP)


# Export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir of three steps under mup at twice its base's width, with checkpoints 2 and 3."""
    folder, choose = tmp_path_factory.mktemp("export"), random.Random(0)
    words = ("def", "return", "import", "class", "self", "value")
    (folder / "text.txt").write_text(
        "\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(300))
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        assert main(["train", *RUN.split()]) == 0
    return folder / "run"


def test_a_run_is_exported_and_comes_back(run: Path, tmp_path: Path) -> None:
    code, out, err = zoo("export", run, "--out", tmp_path / "hf")
    assert (code, err) == (0, "")
    assert "folded from mup" in out
    assert "tokens are bytes" in out
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["eos_token_id"] == 0
    record = config["mupax"]
    assert record["step"] == 3
    assert record["fields"] == {"name": "mup", "base": "lm-proxy"}
    assert record["scales"]["block.attention.query"] == pytest.approx(
        record["factors"]["logits"] * 16**0.5
    )
    source = trained.read(run)
    model, preset_config = source.model, PresetConfig(**record["fields"])
    assert isinstance(model, DecoderConfig)
    stored = source.stored
    assert_same(loaded(tmp_path / "hf", model, preset_config), stored)
    assert_same(loaded(run, model, preset_config), stored)
    # Control: another step has other weights.
    assert (
        np.abs(
            loaded(run / "checkpoints" / "2", model, preset_config)["token"] - stored["token"]
        ).max()
        > 1e-4
    )


def test_a_source_has_the_logits_of_its_preset(run: Path) -> None:
    source = trained.read(run)
    assert source.run is not None
    built, preset = definition(source.model), preset_for(source.run[0].preset, source.model)
    assert source.logits == pretrained.plain.logits_of(built, resolve(preset, built))
    assert (
        source.logits != built.sizes["head_dim"] ** -0.5
    )  # control: another than without a preset


def test_a_step_can_be_named_in_either_way(run: Path, tmp_path: Path) -> None:
    assert zoo("export", run, "--step", 2, "--out", tmp_path / "a", "--dtype", "bfloat16")[0] == 0
    assert (
        zoo("export", run / "checkpoints" / "2", "--out", tmp_path / "b", "--dtype", "bfloat16")[0]
        == 0
    )
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_imported_folder_is_exported_as_it_was(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", TIED)
    assert (
        zoo(
            "import",
            origin,
            "--out",
            tmp_path / "in",
            "--preset",
            "depth-mup",
            "--base",
            "lm-proxy",
        )[0]
        == 0
    )
    assert zoo("export", tmp_path / "in", "--out", tmp_path / "out")[0] == 0
    before, after = Tensors(origin), Tensors(tmp_path / "out")
    assert before.shapes == after.shapes
    for name in before.shapes:
        np.testing.assert_allclose(after.read(name), before.read(name), rtol=5e-7, err_msg=name)


def test_folded_skips_are_said_to_be_inexact(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf")
    code, out, _ = zoo("import", origin, "--out", tmp_path / "in", "--preset", "u-mup")
    assert code == 0
    assert "exact but for the norms' eps" in out
    assert (
        "exact but" not in zoo("import", origin, "--out", tmp_path / "other", "--preset", "mup")[1]
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused_by_their_parameter(
    tmp_path: Path, value: float
) -> None:
    origin = published(tmp_path / "hf")
    stored = Tensors(origin)
    tensors = {name: stored.read(name) for name in stored.shapes}
    name = next(name for name in tensors if "embed_tokens" in name)
    tensors[name][3, 1] = value
    (origin / "model.safetensors").unlink()
    write_tensors(origin, tensors.items(), metadata={"format": "pt"})
    code, _, err = zoo("import", origin, "--out", tmp_path / "in")
    assert code == 2
    assert "token (1 of " in err
    assert not (tmp_path / "in").exists()


def test_a_tokenizer_goes_with_the_model(tmp_path: Path) -> None:
    from mupax.train.data.text import named_tokenizers, tokenizer

    path = tmp_path / "tokenizer.json"
    named_tokenizers.train_bpe([b"a few words, a few more"], 270).save(str(path))
    separator = tokenizer.Subwords(path).separator
    origin = published(tmp_path / "hf")
    assert zoo("export", origin, "--tokenizer", path, "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|endoftext|>"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == separator


def test_the_tokenizer_of_a_run_is_the_one_that_made_its_tokens(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the key that the run recorded, wherever the text that trained it is."""
    from mupax.train.data.text import named_tokenizers, tokenizer

    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    other, mine = (tmp_path / "cache" / "tokenizers" / f"bpe270-text-{text}.json" for text in "ab")
    other.parent.mkdir(parents=True)
    named_tokenizers.train_bpe([b"other words, of other texts"], 270).save(str(other))
    named_tokenizers.train_bpe([b"a few words, a few more"], 270).save(str(mine))
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    of_an_older_version(copy)
    record = json.loads((copy / "config.json").read_text())
    record["config"]["data"]["tokenizer"] = "bpe:270"
    record["data"]["tokenizer"] = tokenizer.Subwords(mine).key
    (copy / "config.json").write_text(json.dumps(record))
    assert zoo("export", copy, "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == mine.read_bytes()
    mine.unlink()
    code, out, _ = zoo("export", copy, "--out", tmp_path / "again")
    assert code == 0
    assert "bpe:270 was not found on this machine; give its file as --tokenizer FILE" in out
    assert not (tmp_path / "again" / "tokenizer.json").exists()


# What is wrong


def wrong(tmp_path: Path, *words: Any) -> str:
    code, out, err = zoo(*words)
    assert code == 2
    assert not out
    assert 1 <= len(err.splitlines()) <= 10
    assert not (tmp_path / "new").exists()
    return err


def test_wrong_words_are_answered(tmp_path: Path, run: Path) -> None:
    origin, new = published(tmp_path / "hf"), tmp_path / "new"
    assert "is not an empty folder" in wrong(tmp_path, "import", origin, "--out", origin)
    assert "no run and no weights there" in wrong(
        tmp_path, "import", tmp_path / "none", "--out", new
    )
    assert "--out" in wrong(tmp_path, "import", origin)
    assert "did you mean 'mup'" in wrong(tmp_path, "import", origin, "--out", new, "--preset", "mu")
    assert "is a vit" in wrong(
        tmp_path, "import", origin, "--out", new, "--preset", "mup", "--base", "vit-proxy"
    )
    assert "takes" in wrong(tmp_path, "import", origin, "--out", new, "--gamma0", "2")
    assert "no checkpoint of step 9" in wrong(tmp_path, "export", run, "--step", 9, "--out", new)
    assert "no flag is named --steps; did you mean --step?" in wrong(
        tmp_path, "export", run, "--steps", 9, "--out", new
    )
    config = json.loads((run / "config.json").read_text())
    config["config"]["model"]["norm"] = "layernorm"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert "no checkpoint yet" in wrong(tmp_path, "export", tmp_path / "other", "--out", new)


def test_a_checkpoint_that_is_not_whole_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "3" / "state")
    (copy / "checkpoints" / "3" / "_CHECKPOINT_METADATA").unlink()
    assert "is damaged: _CHECKPOINT_METADATA is missing" in wrong(
        tmp_path, "export", copy, "--out", tmp_path / "new"
    )


def test_help_names_both() -> None:
    assert re.findall(r"^  (import|export) ", zoo("--help")[1], re.M) == ["import", "export"]
    for command in ("import", "export"):
        assert "--out FOLDER" in zoo(command, "--help")[1]
