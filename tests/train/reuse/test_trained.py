"""Commands that open a trained model read the same paths, and refuse others with the same words.

They refuse them before anything is compiled.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mupax import MupaxError
from mupax.presets.tuned import find
from mupax.train import load
from mupax.train.checkpoints.workdir import write_mark
from mupax.train.core.program import Program
from mupax.train.reuse import trained
from mupax.zoo.configs import EncoderDecoderConfig, ViTConfig
from tests.train.reuse.commands import call, succeed
from tests.train.reuse.random_weights import imported

RUN = (
    "lm-tiny --data.name text:text.txt --data.tokenizer bpe:300 --model.width 8 --model.depth 1 "
    "--model.num-heads 2 --model.seq-len 8 --model.vocab-size 300 --data.batch-size 8 "
    "--data.eval-examples 8"
)
SHORT = (
    "--steps 1 --optimizer.warmup-steps 1 --log.no-progress --log.no-samples "
    "--log.no-tensorboard --workdir"
)
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 300,
}
COMMANDS = {
    "generate": "generate PATH --prompt a",
    "chat": "generate PATH --chat",
    "serve": "serve PATH --port 0",
    "eval": "eval PATH --data.name text:text.txt",
    "predict": "predict PATH image.png",
    "noise": "noise PATH --batches 3",
    "export": "export PATH --out out",
    "import": "import PATH --out out",
    "push": "push PATH --to you/model --dry-run",
    "finetune": f"finetune text.txt --from PATH {SHORT} out",
    "init-from": f"train {RUN} --init-from PATH {SHORT} out",
    "grow": "grow PATH --set depth=2 --out out",
    "convert": "convert PATH --form plain --out out",
}
NEEDS_RUN = {"noise", "grow", "convert"}
"""Commands that go on with a run's state or its data, so that they refuse weights."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the current folder, with a run `lm` and what the cases name."""
    path = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(path):
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
        Image.new("RGB", (8, 8)).save("image.png")
        succeed("train", RUN, SHORT, "lm")
        make_cases()
        yield path


def make_cases() -> None:
    """Write a folder for each fault, most of them copies of the run."""
    Path("empty").mkdir()
    configs: dict[str, object] = {
        "no-weights": GPT2,
        "cut-weights": GPT2,
        "strange": {"model_type": "mamba"},
        "half": GPT2,
        "neither": {"a": 1},
    }
    for name, fields in configs.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(fields))
    Path("cut-weights/model.safetensors").write_bytes(b"\x10\x00")
    write_mark(Path("half"), ["mupax", "import", "x", "--out", "half"], complete=False)
    Path("cut-config").mkdir()
    Path("cut-config/config.json").write_text('{"model_type": "gp')
    sizes: Any = {"width": 8, "depth": 1, "num_heads": 2}
    vit = ViTConfig(**sizes, image_size=8, patch_size=4, channels=3, num_classes=2)
    ed = EncoderDecoderConfig(**sizes, encoder_depth=1, vocab_size=300, seq_len=8)
    imported(Path("vit"), vit, reads_bytes=False)
    imported(Path("ed"), ed, reads_bytes=True)
    for name in ("unsaved", "saving", "lost-tokenizer", "no-record", "damaged"):
        shutil.copytree("lm", name)
    shutil.rmtree("unsaved/checkpoints")
    Path("saving/checkpoints/1").rename("saving/checkpoints/1.saving")
    Path("saving/checkpoints/1.saving/manifest.json").unlink()
    shutil.rmtree("lost-tokenizer/assets")
    Path("no-record/config.json").unlink()


def answer(command: str, path: str) -> tuple[int, str]:
    """Return the exit code of a command on a path, and what it wrote to standard error."""
    try:
        code, _, err = call(COMMANDS[command].replace("PATH", path))
    finally:
        shutil.rmtree("out", ignore_errors=True)
    return code, err


def check_refused(command: str, path: str, *messages: str) -> None:
    code, err = answer(command, path)
    assert code == 2, (command, err)
    for message in messages:
        assert message in err, command


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that gets as far as a program, whose functions are compiled."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a program is made")

    monkeypatch.setattr(Program, "__init__", fail)


FAULTS = {
    "empty": "empty: no run and no weights there",
    "nowhere": "nowhere: no run and no weights there",
    "text.txt": "text.txt is a file, and no safetensors",
    "lm/metrics.jsonl": "lm/metrics.jsonl is a file, and no safetensors",
    "lm/checkpoints/1/manifest.json": "manifest.json is a file, and no safetensors",
    "saving/checkpoints/1.saving": "1.saving is no checkpoint",
    "saving": "saving has no checkpoint yet",
    "saving/checkpoints/1": "saving has no checkpoint yet",
    "unsaved": "unsaved has no checkpoint yet",
    "lm/checkpoints/7": "lm has no checkpoint of step 7; there are 1",
    "lm/checkpoints/best": "no checkpoint of lm was saved with a finite eval_loss",
    "half": "half is not complete: it was not finished by `mupax import x --out half`",
    "cut-config": "cut-config/config.json: not JSON",
    "neither": "neither/config.json is neither a run's nor Hugging Face's",
    "lm-tiny": "lm-tiny is a recipe, and no run; train it by `mupax train lm-tiny`",
    "TUNED": "is a tuned preset, and no run; train with --preset",
}
"""Paths to what every command says."""


WITH_EVERY_COMMAND = ("nowhere", "saving/checkpoints/1")
SHARE = 4
"""Commands that are tried on each of the other paths. Every command has its turn on some path."""


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("path", FAULTS)
def test_every_command_refuses_a_path_with_the_same_words(path: str) -> None:
    message = FAULTS[path]
    commands = [*COMMANDS]
    if path not in WITH_EVERY_COMMAND:
        start = SHARE * [*FAULTS].index(path)
        commands = [commands[(start + number) % len(commands)] for number in range(SHARE)]
    path = min(find.files()) if path == "TUNED" else path
    for command in commands:
        check_refused(command, path, message)
    with pytest.raises(MupaxError) as refused:
        load(path)
    assert message in str(refused.value)


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "no-weights",
            "no-weights: holds neither model.safetensors nor model.safetensors.index.json",
        ),
        ("cut-weights", "cut-weights/model.safetensors: not a whole safetensors file"),
        ("strange", "model_type is 'mamba'"),
    ],
)
def test_folders_of_weights_are_refused_alike(path: str, message: str) -> None:
    for command in ("generate", "predict", "export", "push", "init-from", "grow"):
        if (command, path) == ("push", "strange"):
            continue  # a folder of Hugging Face goes as it is, whatever its model
        needs_run = f"{path} holds weights, and no run; `mupax train RECIPE --init-from"
        check_refused(command, path, needs_run if command in NEEDS_RUN else message)


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "init-from"])
def test_a_run_that_lost_its_tokenizer_is_refused_by_all_that_read_text(command: str) -> None:
    message = "assets/tokenizer.json is missing; copy the folder assets of the run"
    check_refused(command, "lost-tokenizer", f"lost-tokenizer/{message}")


OTHER_FAMILY = {
    ("generate", "vit"): "vit holds a vit, and generate is for decoders and encoder-decoders",
    ("chat", "vit"): "vit holds a vit, and generate --chat is for decoders",
    ("serve", "vit"): "vit holds a vit, and serve is for decoders",
    ("chat", "ed"): "ed holds an encoder-decoder, and generate --chat is for decoders",
    ("serve", "ed"): "ed holds an encoder-decoder, and serve is for decoders",
    ("predict", "ed"): "ed holds an encoder-decoder, and predict is for models of images",
    ("predict", "lm"): "lm holds a decoder, and predict is for models of images",
    ("eval", "vit"): "the model, a vit, reads images",
    ("eval", "ed"): "ed holds an encoder-decoder, and not what noise it was trained on",
    ("finetune", "vit"): "vit holds a model of images",
    ("finetune", "ed"): "ed holds an encoder-decoder, and not what noise it was trained on",
}
USE = {
    "vit": "reads images; `mupax predict` is for it",
    "ed": "`mupax generate` is for it",
    "lm": "`mupax generate` is for it",
}


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(("command", "path"), OTHER_FAMILY)
def test_a_model_of_another_family_is_refused(command: str, path: str) -> None:
    use = "" if command in ("eval", "finetune") else USE[path]
    check_refused(command, path, OTHER_FAMILY[command, path], use)


@pytest.mark.parametrize("path", ["lm/checkpoints", "no-record"])
def test_every_command_reads_what_one_reads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: these get as far as a program, or are written."""

    class ReachedError(BaseException):  # commands make a message of every Exception
        pass

    def reach(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr(Program, "__init__", reach)
    for command in ("export", "push"):
        code, err = answer(command, path)
        assert code == 0, (command, err)
    for command in ("generate", "eval", "noise", "finetune", "init-from", "grow"):
        with pytest.raises(ReachedError):
            pytest.fail(f"{command}: {answer(command, path)}")
    assert trained.describe(Path(path)).exact_path.name == "1"


def test_fine_tuning_keeps_the_field_of_a_run_where_the_folder_has_it() -> None:
    shutil.copytree("lm", "fields")
    record = json.loads(Path("fields/config.json").read_text())
    record["config"]["data"] |= {"name": "records:body.jsonl", "field": "body"}
    Path("fields/config.json").write_text(json.dumps(record))
    Path("body.jsonl").write_text(json.dumps({"body": "a quick fox"}) + "\n")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "fox"}]
    Path("chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    for data, field in {"body.jsonl": "body", "text.txt": "text", "chat.jsonl": "text"}.items():
        done = succeed("finetune", data, "--from fields --print-config")
        assert json.loads(done.out)["data"]["field"] == field, data
