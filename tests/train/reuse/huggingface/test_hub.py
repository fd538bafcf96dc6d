"""ORG/NAME in the place of a folder, against a server that answers as the hub does: what is read, what is refused, by which commit."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.__main__ import main
from mupax.train.config.data import PixelsConfig
from mupax.train.reuse import source
from mupax.train.reuse.huggingface import files
from mupax.train.reuse.image_input import ImageInput
from mupax.zoo.configs import DecoderConfig, ViTConfig
from mupax.zoo.definition import definition
from mupax.zoo.huggingface.tensorfile import SINGLE
from tests.fixtures.hub import TOKEN, ModelHub, model_hub
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture

NOBODY = "http://127.0.0.1:9"
"""An address at which nothing answers."""
SIZES: dict[str, Any] = {"width": 8, "depth": 1, "num_heads": 2}
VIT = ViTConfig(**SIZES, image_size=8, patch_size=4, channels=3, num_classes=2, pool="cls")
GPT = DecoderConfig(**SIZES, vocab_size=256, seq_len=16, tied=True)


def published(folder: Path, model: Any, seed: int) -> Path:
    """A model of random weights as `export` writes it, among files that nothing here reads."""
    random, shapes = (
        np.random.default_rng(seed),
        {n: leaf.shape for n, leaf in definition(model).abstract.items()},
    )
    params = {
        name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()
    }
    images = (
        ImageInput(("a", "b"), PixelsConfig(fit="squash")) if isinstance(model, ViTConfig) else None
    )
    weights = source.WeightsSource(
        model, params, dict.fromkeys(params, np.ones(())), {}, [], images=images
    )
    files.write_huggingface(weights, folder, "float32")
    (folder / "onnx").mkdir()
    for name in ("pytorch_model.bin", "README.md", "onnx/model.onnx", "model.fp16.safetensors"):
        (folder / name).write_bytes(b"x" * 50)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A hub with me/vit, whose branch `other` has other weights; folders of the same models, pictures and a text are here."""
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    with contextlib.chdir(tmp_path), model_hub(tmp_path / "cache") as server:
        server.add("me/vit", published(tmp_path / "vit", VIT, 0))
        revision = server.add("me/other", published(tmp_path / "other", VIT, 1)).revisions["main"]
        server.repositories["me/vit"].revisions["other"] = revision
        server.add("me/gpt", published(tmp_path / "gpt", GPT, 0))
        for label in "ab":
            Path("pictures", label).mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (8, 8), (40 * i, 90 * (label == "b"), 0)).save(
                    f"pictures/{label}/{i}.png"
                )
        Path("text.txt").write_text("word " * 400)
        yield server


def run(words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words.split())
    return code, out.getvalue(), " ".join(err.getvalue().split())


def answer(words: str) -> str:
    code, out, err = run(words)
    assert code == 0, err
    return out


def test_a_name_answers_as_the_folder_does_and_brings_only_what_is_read(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer("predict vit pictures --json")
    code, out, err = run("predict me/vit pictures --json")
    assert (code, out) == (0, expected), err
    commit = hub.repositories["me/vit"].commit("main")
    assert f"me/vit at {commit[:12]}, of the hub, is in {Path.cwd()}/cache/hub/" in err  # pyright: ignore
    assert hub.downloads() == {"config.json", SINGLE, "preprocessor_config.json"}
    hub.calls.clear()
    assert answer("predict me/vit pictures --json") == expected
    assert not hub.downloads()  # they are in the cache
    # The control: another revision has other weights.
    assert answer("predict me/vit pictures --json --revision other") != expected
    assert answer("predict other pictures --json") == answer(
        "predict me/vit pictures --json --revision other"
    )
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)  # without an answer of the hub the cache serves
    hub.calls.clear()
    assert answer("predict me/vit pictures --json") == expected
    assert not hub.calls


def test_fine_tuning_starts_from_the_weights_of_the_name(hub: ModelHub) -> None:
    words = "--steps 2 --data.no-augment --data.batch-size 8 --log.no-tensorboard --log.no-progress --workdir"
    losses = {}
    for name in ("vit", "me/vit", "other"):
        code, _, err = run(f"finetune pictures --from {name} {words} runs/{name.replace('/', '-')}")
        assert code == 0, err
        rows = map(
            json.loads,
            Path("runs", name.replace("/", "-"), "metrics.jsonl").read_text().splitlines(),
        )
        losses[name] = [row["loss"] for row in rows if "loss" in row]
    assert losses["vit"] == losses["me/vit"] != losses["other"]
    recorded = json.loads(Path("runs/me-vit/config.json").read_text())["config"]["init"][
        "init_from"
    ]
    assert Path(recorded).name == hub.repositories["me/vit"].commit(
        "main"
    )  # a later main is not taken for it


def test_text_is_written_and_measured_by_a_name(hub: ModelHub) -> None:
    words = "--prompt wo --tokens 5 --temperature 0 --data.tokenizer bytes"
    assert answer(f"generate me/gpt {words}") == answer(f"generate gpt {words}")
    words = "--data.name text:text.txt --data.tokenizer bytes --data.batch-size 8 --json"
    answer(f"eval me/gpt {words} by-name.json")
    answer(f"eval gpt {words} by-folder.json")
    numbers = [json.loads(Path(name).read_text()) for name in ("by-name.json", "by-folder.json")]
    assert {name for name, x in numbers[0].items() if x != numbers[1][name]} <= {
        "seconds",
        "workdir",
    }


def test_import_takes_a_name_and_keeps_what_lies_beside_the_weights(hub: ModelHub) -> None:
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    )
    for name in (*names, "tokenizer.model"):
        Path("gpt", name).write_text("{}")
    Path("gpt", "chat_template.jinja").write_text("{{ messages }}")
    hub.add("me/chat", Path("gpt"))
    assert main(["import", "me/chat", "--out", "in"]) == 0
    assert all(
        Path("in", name).read_bytes() == Path("gpt", name).read_bytes()
        for name in (*names, "chat_template.jinja")
    )
    assert not Path("in", "tokenizer.model").exists()  # nothing here reads it
    assert main(["import", "me/vit", "--revision", "other", "--out", "other-in"]) == 0
    assert Path("other-in", "preprocessor_config.json").is_file()


def test_parts_come_by_their_index(hub: ModelHub) -> None:
    whole = answer("predict vit pictures --json")
    part = "a-of-1.safetensors"
    parts = hub.add("me/parts", Path("vit")).revisions["main"]
    content = parts[part] = parts.pop(SINGLE)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    weight_map = {name: part for name in header if name != "__metadata__"}
    index = parts["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    assert answer("predict me/parts pictures --json") == whole
    cut = hub.add("me/cut", Path("vit")).revisions["main"]
    del cut[SINGLE]
    cut["model.safetensors.index.json"] = index
    code, _, err = run("predict me/cut pictures")
    assert (code, f"has no {part}, and of weights only safetensors is read" in err) == (2, True), (
        err
    )


def test_a_folder_of_the_name_wins_and_that_is_said(hub: ModelHub) -> None:
    shutil.copytree("other", "me/vit")
    code, out, err = run("predict me/vit pictures --json")
    assert (code, out) == (0, answer("predict other pictures --json"))
    assert (
        "note: me/vit is a folder here, and is read in place of a model of that name on the hub"
        in err
    )
    assert not hub.calls
    code, _, err = run("predict me/vit pictures --revision main")
    assert (
        code,
        "--revision is of a model of the Hugging Face hub, and me/vit is here; leave it out" in err,
    ) == (
        2,
        True,
    )
    # A path in a folder that is here is a slip, and is told to nobody; a revision says that a name is meant.
    code, _, err = run("predict me/gpt pictures")
    assert (code, "me/gpt: no run and no weights there" in err, hub.calls) == (2, True, [])
    code, _, err = run("predict me/gpt pictures --revision main")
    assert (code, "holds a decoder, and predict is for models of images" in err) == (2, True), err


def test_what_gives_no_weights_is_said_before_anything_is_compiled(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.jit", lambda *_, **__: pytest.fail("compiled"))
    hub.add("me/secret", Path("vit"), private=True)
    hub.add("me/gated", Path("vit"), gated=True)
    del hub.add("me/pickle", Path("vit")).revisions["main"][SINGLE]
    hub.add("me/mamba", Path("vit")).revisions["main"]["config.json"] = b'{"model_type": "mamba"}'
    del hub.add("me/bare", Path("vit")).revisions["main"]["config.json"]
    commit = hub.repositories["me/vit"].commit("main")[:12]  # pyright: ignore
    no_token = (
        "write a token that may read it into HF_TOKEN, or run `hf auth login`; there is none here"
    )
    unknown = f"is no folder here, and no model of the hub that may be read: look up its name, or where it is private {no_token}"
    cases = {
        "me/none": f"me/none {unknown}",
        "me/secret": f"me/secret {unknown}",
        "me/gated": f"me/gated is gated: ask for it on its page of the hub, then {no_token}",
        "me/pickle": f"me/pickle at {commit} has no {SINGLE}, and of weights only safetensors is read. Look for a branch",
        "me/mamba": f"me/mamba at {commit}: config.json: model_type is 'mamba'; only ",
        "me/bare": f"me/bare at {commit} has no config.json; give a model that `transformers` reads",
        "me/vit --revision v9": "me/vit has no revision v9; write a branch, tag or commit of it as --revision",
        "me/a..b": "no folder me/a..b, and no name of the hub: ",
        "none --revision main": "--revision is of a model of the Hugging Face hub, and none is no ORG/NAME; leave it out",
    }
    for name, message in cases.items():
        for words in (
            f"finetune pictures --from {name}",
            f"predict {name.replace(' ', ' pictures ', 1)}",
        ):
            words = words if " pictures" in words else f"{words} pictures"
            code, _, err = run(words)
            assert (code, message in err, err.count("error: ")) == (2, True, 1), err
    assert SINGLE not in hub.downloads()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the one that is here may not read it" in run("finetune pictures --from me/secret")[2]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("me/secret", "me/gated"):  # the control
        assert run(f"finetune pictures --from {name} --print-config")[0] == 0
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    code, _, err = run("finetune pictures --from me/gpt")
    assert (
        code,
        "me/gpt is no folder here, has no whole copy in the cache, and the hub gives none (" in err,
    ) == (
        1,
        True,
    ), err
    assert "`hf download me/gpt --local-dir FOLDER`, and give the folder" in err
