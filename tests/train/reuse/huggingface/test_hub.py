"""ORG/NAME in place of a folder, against a server that answers as the hub does."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mupax.train.config.data import PixelsConfig
from mupax.train.reuse.huggingface import files
from mupax.train.reuse.image_input import ImageInput
from mupax.zoo.configs import DecoderConfig, ViTConfig
from mupax.zoo.huggingface.tensorfile import SINGLE
from tests.fixtures.devices import one_device
from tests.fixtures.generators import shared_generators
from tests.fixtures.hub import TOKEN, ModelHub, model_hub
from tests.fixtures.programs import shared_programs
from tests.train.reuse.commands import call, read_json, rows_with, succeed
from tests.train.reuse.random_weights import random_params, source_of

__all__ = ["one_device", "shared_generators", "shared_programs"]  # fixtures

NOBODY = "http://127.0.0.1:9"
"""An address at which nothing answers."""
SIZES: dict[str, Any] = {"width": 8, "depth": 1, "num_heads": 2}
VIT = ViTConfig(**SIZES, image_size=8, patch_size=4, channels=3, num_classes=2, pool="cls")
GPT = DecoderConfig(**SIZES, vocab_size=256, seq_len=16, tied=True)
INDEX = "model.safetensors.index.json"
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def published(folder: str, model: Any, seed: int) -> Path:
    """Write a model as `export` does, among files that are not read."""
    is_vit = isinstance(model, ViTConfig)
    images = ImageInput(("a", "b"), PixelsConfig(fit="squash")) if is_vit else None
    weights = source_of(model, random_params(model, seed, std=0.3), images=images)
    files.write_huggingface(weights, Path(folder), "float32")
    Path(folder, "onnx").mkdir()
    for name in ("pytorch_model.bin", "README.md", "onnx/model.onnx", "model.fp16.safetensors"):
        Path(folder, name).write_bytes(b"x" * 50)
    return Path(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A hub with me/vit, whose branch `other` has the weights of me/other, and me/gpt.

    The current folder has the same models, pictures and a text.
    """
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    with contextlib.chdir(tmp_path), model_hub(tmp_path / "cache") as server:
        server.add("me/vit", published("vit", VIT, 0))
        revision = server.add("me/other", published("other", VIT, 1)).revisions["main"]
        server.repositories["me/vit"].revisions["other"] = revision
        server.add("me/gpt", published("gpt", GPT, 0))
        for label in "ab":
            Path("pictures", label).mkdir(parents=True)
            for i in range(6):
                colour = (40 * i, 90 * (label == "b"), 0)
                Image.new("RGB", (8, 8), colour).save(f"pictures/{label}/{i}.png")
        Path("text.txt").write_text("word " * 400)
        yield server


def predicted(source: str) -> str:
    return succeed("predict", source, "pictures --json").out


def test_a_name_answers_as_the_folder_does_and_brings_only_what_is_read(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = predicted("vit")
    result = succeed("predict me/vit pictures --json")
    assert result.out == expected
    commit = hub.repositories["me/vit"].commit("main")
    assert commit is not None
    assert f"me/vit at {commit[:12]}, of the hub, is in {Path.cwd()}/cache/hub/" in result.err
    assert hub.downloads() == {"config.json", SINGLE, "preprocessor_config.json"}
    hub.calls.clear()
    assert predicted("me/vit") == expected
    assert not hub.downloads()  # they are in the cache
    # The control: another revision has other weights.
    other = predicted("me/vit --revision other")
    assert predicted("other") == other != expected
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)  # without an answer of the hub the cache serves
    hub.calls.clear()
    assert predicted("me/vit") == expected
    assert not hub.calls


def test_fine_tuning_starts_from_the_weights_of_the_name(hub: ModelHub) -> None:
    words = (
        "--steps 2 --data.no-augment --data.batch-size 8 --log.no-tensorboard --log.no-progress "
        "--workdir runs"
    )
    losses = {}
    for name in ("vit", "me/vit", "other"):
        succeed(f"finetune pictures --from {name} {words}/{name}")
        losses[name] = [row["loss"] for row in rows_with("loss", f"runs/{name}")]
    assert losses["vit"] == losses["me/vit"] != losses["other"]
    # By its commit, so that a later main is not taken for it.
    init_from = read_json("runs/me/vit/config.json")["config"]["init"]["init_from"]
    assert Path(init_from).name == hub.repositories["me/vit"].commit("main")


def test_text_is_written_and_measured_by_a_name(hub: ModelHub) -> None:
    words = "--prompt wo --tokens 5 --temperature 0 --data.tokenizer bytes"
    texts = {succeed("generate", name, words).out for name in ("me/gpt", "gpt")}
    assert len(texts) == 1
    words = "--data.name text:text.txt --data.tokenizer bytes --data.batch-size 8 --json"
    reports = []
    for name in ("me/gpt", "gpt"):
        succeed("eval", name, words, "report.json")
        reports.append(read_json("report.json"))
    differences = {field for field, value in reports[0].items() if value != reports[1][field]}
    assert differences <= {"seconds", "workdir"}


def test_import_takes_a_name_and_keeps_what_lies_beside_the_weights(hub: ModelHub) -> None:
    for name in (*COMPANION_FILES, "tokenizer.model"):
        Path("gpt", name).write_text("{}")
    hub.add("me/chat", Path("gpt"))
    succeed("import me/chat --out in")
    for name in COMPANION_FILES:
        assert Path("in", name).read_text() == "{}"
    assert not Path("in", "tokenizer.model").exists()  # it is not read
    succeed("import me/vit --revision other --out other-in")
    assert Path("other-in", "preprocessor_config.json").is_file()


def test_parts_come_by_their_index(hub: ModelHub) -> None:
    part = "a-of-1.safetensors"
    parts = hub.add("me/parts", Path("vit")).revisions["main"]
    content = parts.pop(SINGLE)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    weight_map = {name: part for name in header if name != "__metadata__"}
    parts[part] = content
    parts[INDEX] = json.dumps({"weight_map": weight_map}).encode()
    assert predicted("me/parts") == predicted("vit")
    cut = hub.add("me/cut", Path("vit")).revisions["main"]
    del cut[SINGLE]
    cut[INDEX] = parts[INDEX]
    code, _, err = call("predict me/cut pictures")
    assert code == 2
    assert f"has no {part}, and of weights only safetensors is read" in err


def test_a_folder_of_the_name_wins_and_that_is_said(hub: ModelHub) -> None:
    shutil.copytree("other", "me/vit")
    result = succeed("predict me/vit pictures --json")
    assert result.out == predicted("other")
    note = "me/vit is a folder here, and is read in place of a model of that name on the hub"
    assert f"note: {note}" in result.err
    assert not hub.calls
    flag = (
        "--revision is for a model of the Hugging Face hub, and me/vit is a path here; leave it out"
    )
    # A path in a folder that is here is a slip, and the hub is not asked. With a revision a name
    # is meant.
    for words, message, asks in (
        ("me/vit pictures --revision main", flag, False),
        ("me/gpt pictures", "me/gpt: no run and no weights there", False),
        ("me/gpt pictures --revision main", "holds a decoder, and predict is for", True),
    ):
        code, _, err = call("predict", words)
        assert code == 2
        assert message in err
        assert bool(hub.calls) == asks


NO_TOKEN = (
    "write a token that may read it into HF_TOKEN, or run `hf auth login`; there is none here"
)
UNKNOWN = (
    "is no folder here, and no model of the hub that may be read: look up its name, or where it is "
    f"private {NO_TOKEN}"
)
REFUSALS = {
    "me/none": f"me/none {UNKNOWN}",
    "me/secret": f"me/secret {UNKNOWN}",
    "me/gated": f"me/gated is gated: ask for it on its page of the hub, then {NO_TOKEN}",
    "me/pickle": f"me/pickle at COMMIT has no {SINGLE}, and of weights only safetensors is read. "
    "Look for a branch",
    "me/mamba": "me/mamba at COMMIT: config.json: model_type is 'mamba'; only ",
    "me/bare": "me/bare at COMMIT has no config.json; give a model that `transformers` reads",
    "me/vit --revision v9": "me/vit has no revision v9; write a branch, tag or commit of it as "
    "--revision",
    "me/a..b": "no folder me/a..b, and no name of the hub: ",
    "none --revision main": "--revision is for a model of the Hugging Face hub, and none is no "
    "ORG/NAME; leave it out",
}


def test_a_name_without_weights_is_refused_before_anything_is_compiled(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.jit", lambda *_, **__: pytest.fail("compiled"))
    hub.add("me/secret", Path("vit"), private=True)
    hub.add("me/gated", Path("vit"), gated=True)
    del hub.add("me/pickle", Path("vit")).revisions["main"][SINGLE]
    hub.add("me/mamba", Path("vit")).revisions["main"]["config.json"] = b'{"model_type": "mamba"}'
    del hub.add("me/bare", Path("vit")).revisions["main"]["config.json"]
    commit = hub.repositories["me/vit"].commit("main")
    assert commit is not None
    for source, message in REFUSALS.items():
        name, *flags = source.split()
        for words in (f"finetune pictures --from {name}", f"predict {name} pictures"):
            code, _, err = call(words, *flags)
            assert code == 2, err
            assert message.replace("COMMIT", commit[:12]) in err
            assert err.count("error: ") == 1
    assert SINGLE not in hub.downloads()

    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    err = call("finetune pictures --from me/secret").err
    assert "the one that is here may not read it" in err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("me/secret", "me/gated"):  # the control
        succeed("finetune pictures --print-config --from", name)
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    code, _, err = call("finetune pictures --from me/gpt")
    assert code == 1
    unread = "is no folder here, has no whole copy in the cache, and the hub gives none ("
    assert f"me/gpt {unread}" in err
    assert "`hf download me/gpt --local-dir FOLDER`, and give the folder" in err
