"""A run keeps what its model needs: a copy of its workdir is used where neither its training data nor the cache is."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.__main__ import main
from mupax.disk import path_of
from mupax.train import data as data_sources
from mupax.train.checkpoints import assets, layout
from mupax.train.config.data import DataConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.data import assets as data_assets
from mupax.train.data.chats import templates
from mupax.train.data.text.tokenizer import Subwords
from mupax.train.reuse import trained
from tests.fixtures.emulator import bucket, emulator
from tests.fixtures.programs import shared_programs

__all__ = ["bucket", "emulator", "shared_programs"]  # fixtures

WORDS = ("def", "return", "import", "class", "self", "value", "lambda", "yield", "while", "None")
MODEL = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 48 --model.vocab-size 300"
)
TRAINING = (
    "--data.batch-size 16 --data.eval-examples 32 --data.eval-batch-size 32 --optimizer.warmup-steps 1 --steps 4 "
    "--checkpoint.every-steps 2 --log.no-tensorboard --log.no-samples"
)
BPE = f"train lm-tiny --data.name text:texts --data.tokenizer bpe:300 {MODEL} {TRAINING}"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def run(words: str) -> tuple[int, str, str]:
    """Run a command of `mupax train` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words.split())
    return code, out.getvalue(), err.getvalue()


def succeeded(words: str) -> str:
    code, out, err = run(words)
    assert code == 0, err
    return out


def write_texts(folder: Path, seed: int) -> None:
    folder.mkdir(exist_ok=True)
    choose = random.Random(seed)
    # Other words than before make another tokenizer.
    words = [*WORDS, *(f"{choose.choice(WORDS)}{seed}{choose.choice(WORDS)}" for _ in range(9))]
    for number in range(4):
        lines = (" ".join(choose.choices(words, k=9)) for _ in range(150))
        (folder / f"{seed}-{number}.txt").write_text("\n".join(lines))


def named(workdir: Path, step: int) -> assets.Entries:
    return layout.read(workdir / "checkpoints" / str(step)).assets


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with texts, conversations, and the run `lm` whose tokenizer was made from its texts."""
    path = tmp_path_factory.mktemp("project")
    write_texts(path / "texts", 0)
    write_texts(path / "other", 1)
    turns = [(f"self {i}", f"value {i % 7}") for i in range(400)]
    chats = [
        [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        for ask, answer in turns
    ]
    (path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    (path / "template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        succeeded(f"{BPE} --workdir lm")
        yield path


@pytest.fixture
def elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workdir alone on another machine: no training data, an empty cache."""
    shutil.copytree(project / "lm", tmp_path / "lm")
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "lm"


def test_every_manifest_names_the_files_with_size_and_digest(project: Path) -> None:
    workdir = project / "lm"
    entries = named(workdir, 2)
    assert entries == named(workdir, 4)
    assert set(entries) == {"assets/tokenizer.json", "assets/assets.json"}
    assert all((workdir / path).stat().st_size == size for path, (size, _) in entries.items())
    record = json.loads((workdir / "assets" / "assets.json").read_text())
    assert record["tokenizer"]["name"] == "bpe:300"
    assert record["tokenizer"]["separator"] == {"text": "<|endoftext|>", "id": 0}
    facts = json.loads((workdir / "config.json").read_text())["data"]
    assert (
        record["tokenizer"]["key"]
        == facts["tokenizer"]
        == Subwords(workdir / "assets" / "tokenizer.json").key
    )


def test_a_copy_of_the_workdir_is_all_that_commands_need(project: Path, elsewhere: Path) -> None:
    write_texts(Path("new"), 1)
    shutil.copy(project / "chat.jsonl", ".")
    shutil.copy(project / "template.jinja", ".")
    prompt = "--prompt def --tokens 6 --temperature 0"
    with contextlib.chdir(project):
        before = succeeded(f"generate lm {prompt}")
    assert (
        succeeded(f"generate lm {prompt}")
        == succeeded(f"generate lm/checkpoints/4 {prompt}")
        == before
    )
    succeeded("eval lm --data.name text:new --json new.json")
    assert json.loads(Path("new.json").read_text())["data_of_the_run"] is False
    assert main(["export", "lm", "--out", "exported"]) == 0
    assert (
        Path("exported/tokenizer.json").read_bytes()
        == Path("lm/assets/tokenizer.json").read_bytes()
    )
    assert succeeded(f"generate exported {prompt}") == before
    succeeded("convert lm --form plain --out plain")
    assert succeeded(f"generate plain {prompt}") == before
    succeeded("grow lm --set depth=2 --out grown")
    assert succeeded(f"generate grown {prompt}") == before
    assert named(Path("grown"), 4) == named(Path("lm"), 4)

    few = f"--steps 2 {' '.join(TRAINING.split()[:6])} --optimizer.warmup-steps 1 --log.no-tensorboard"
    succeeded(
        f"finetune chat.jsonl --from lm --data.chat-template template.jinja --workdir chat {few}"
    )
    assert set(named(Path("chat"), 2)) == {
        f"assets/{name}" for name in ("assets.json", "tokenizer.json", "chat_template.jinja")
    }
    for gone in ("lm", "cache", "chat.jsonl", "template.jinja"):
        shutil.rmtree(gone) if Path(gone).is_dir() else Path(gone).unlink()
    succeeded(f"generate chat {prompt}")
    service = trained.open_model(Path("chat"))
    template = templates.find(service.config.data.tokenizer, service.config.data.chat_template)
    assert template is not None
    assert template.source == TEMPLATE
    succeeded(f"finetune new --from chat --workdir text {few}")
    assert (
        Path("text/assets/tokenizer.json").read_bytes()
        == Path("exported/tokenizer.json").read_bytes()
    )


def grown_copy(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder with the run and its texts, to which one was added, and an empty cache."""
    shutil.copytree(project / "lm", tmp_path / "lm")
    shutil.copytree(project / "texts", tmp_path / "texts")
    shutil.copy(project / "other" / "1-0.txt", tmp_path / "texts")
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_resumed_run_keeps_its_tokenizer_where_the_folder_has_grown(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown_copy(project, tmp_path, monkeypatch)
    code, _, err = run(f"{BPE} --workdir lm --resume --steps 6 --resume-change schedule")
    assert code == 2
    assert "--resume-change data" in err
    out = succeeded(f"{BPE} --workdir lm --resume --steps 6 --resume-change data schedule")
    assert "training a tokenizer" not in out
    assert named(Path("lm"), 6) == named(Path("lm"), 4)
    for path in named(Path("lm"), 6):
        assert (Path("lm") / path).read_bytes() == (project / "lm" / path).read_bytes()


@pytest.mark.parametrize("damage", ["flipped", "missing", "cut"])
def test_a_damaged_or_missing_tokenizer_is_named(damage: str, elsewhere: Path) -> None:
    file = elsewhere / "assets" / "tokenizer.json"
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if damage == "flipped" else content[:-3])
    Path("text.txt").write_text("def self")
    for words in ("generate lm --prompt a", "finetune text.txt --from lm"):
        code, _, err = run(words)
        assert code == 2
        assert "lm/assets/tokenizer.json" in err
    code, out, _ = run("checkpoints lm")
    assert (code, out.count("assets/tokenizer.json")) == (1, 2)


def test_what_is_lost_comes_back_when_the_run_goes_on_with_its_data(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown_copy(project, tmp_path, monkeypatch)
    shutil.rmtree("lm/assets")
    # Texts that make another tokenizer must not take the place of the lost one.
    code, _, err = run(f"{BPE} --workdir lm --resume --steps 6 --resume-change data schedule")
    assert code == 2
    assert "lm/assets/tokenizer.json" in err
    assert not Path("lm/assets").exists()
    Path("texts/1-0.txt").unlink()
    succeeded(f"{BPE} --workdir lm --resume")
    assert (
        Path("lm/assets/tokenizer.json").read_bytes()
        == (project / "lm/assets/tokenizer.json").read_bytes()
    )
    assert not assets.problems(Path("lm"), named(Path("lm"), 4))


def of_an_older_version(workdir: Path) -> None:
    """Make a run one of the version that kept its tokenizer in the cache alone."""
    shutil.rmtree(workdir / "assets")
    for file in workdir.glob("checkpoints/*/manifest.json"):
        body = json.loads(file.read_text())["manifest"]
        del body["assets"]
        content = {
            "format": "mupax-checkpoint-2",
            "digest": layout._digest_of(body),
            "manifest": body,
        }
        file.write_text(json.dumps(content))


def test_a_run_of_an_older_version_is_read_from_the_cache_and_gets_its_files_when_it_goes_on(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown_copy(project, tmp_path, monkeypatch)
    of_an_older_version(Path("lm"))
    code, _, err = run("generate lm --prompt a --tokens 2")  # nothing has its tokenizer any more
    assert code == 2
    assert "lm/assets" in err
    shutil.copytree(
        project / "lm" / "assets", "lm/assets", ignore=shutil.ignore_patterns("assets.json")
    )
    succeeded("generate lm --prompt a --tokens 2")
    shutil.rmtree("lm/assets")
    monkeypatch.setenv("MUPAX_DATA", str(project / "cache"))
    succeeded("generate lm --prompt a --tokens 2")
    assert main(["export", "lm", "--out", "exported"]) == 0
    assert Path("exported/tokenizer.json").is_file()
    Path("texts/1-0.txt").unlink()
    succeeded(f"{BPE} --workdir lm --resume --steps 6 --resume-change schedule")
    assert set(named(Path("lm"), 6)) == {"assets/tokenizer.json", "assets/assets.json"}
    shutil.rmtree("texts")
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    for step in (4, 6):
        succeeded(f"generate lm --step {step} --prompt a --tokens 2")


def test_a_branch_has_the_files_too(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project / "lm", tmp_path / "lm")
    succeeded(f"{BPE} --workdir {tmp_path}/lm --resume --resume-from 2")
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    succeeded("generate lm/branches/4 --prompt a --tokens 2")


def test_another_chat_template_leaves_earlier_checkpoints_theirs(
    project: Path, tmp_path: Path
) -> None:
    chat = f"train lm-tiny --data.name chat:chat.jsonl {MODEL} {TRAINING} --workdir {tmp_path}/chat"
    succeeded(f"{chat} --data.chat-template template.jinja")
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("<|endoftext|>", "<|end|>"))
    goes_on = "--resume --steps 6 --resume-change data schedule"
    succeeded(f"{chat} --data.chat-template {other} {goes_on}")
    other.unlink()
    sources: list[str] = []
    for step in (4, 6):
        run_assets = assets.find(tmp_path / "chat", step)
        assert run_assets is not None
        assert run_assets.chat_template is not None
        sources.append(run_assets.chat_template.read_text())
    assert sources == [TEMPLATE, TEMPLATE.replace("<|endoftext|>", "<|end|>")]
    succeeded(f"{chat} --data.chat-template {other} {goes_on}")  # its file is gone, the run has it


def test_eval_reads_other_texts_by_the_tokenizer_of_the_run(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    lines = [
        json.dumps({"text": text})
        for text in (project / "other" / "1-0.txt").read_text().splitlines()
    ]
    file.write_text("\n".join(lines))
    (tmp_path / "hf").mkdir()
    for split in ("train", "validation"):
        shutil.copy(file, tmp_path / "hf" / f"{split}.jsonl")
    tokenizer = "--data.tokenizer bpe:300"
    places = (
        "text:other",
        f"records:{file}",
        f"hf:{tmp_path}/hf",
        "chat:chat.jsonl --data.chat-template template.jinja",
    )
    for other in places:
        succeeded(f"eval lm --data.name {other} {tokenizer if other == 'text:other' else ''}")
    code, _, err = run("eval lm --data.name text:other --data.tokenizer bpe:290")
    assert code == 2
    assert "--data.tokenizer" in err


def test_eval_reads_a_text_in_place_of_the_mixture(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = f"--data.mix a=text:{project}/texts:0.7 b=text:{project}/other:0.3 --data.evaluate c=text:{tmp_path}/c"
    shutil.copytree(project / "texts", tmp_path / "c")
    succeeded(f"train lm-tiny {mix} {MODEL} {TRAINING} --workdir {tmp_path}/mix")
    monkeypatch.chdir(tmp_path)
    numbers: dict[str, Any] = {}
    for name, flags in {
        "own": "",
        "text": f"--data.name text:{project}/other",
        "other": f"--data.mix x=text:{project}/other:1",
    }.items():
        succeeded(f"eval mix {flags} --json {name}.json")
        numbers[name] = json.loads(Path(f"{name}.json").read_text())
    assert [each["data"] for each in numbers.values()] == ["mix", f"text:{project}/other", "mix"]
    assert [each["data_of_the_run"] for each in numbers.values()] == [True, False, False]
    assert numbers["text"]["loss"] != numbers["own"]["loss"]
    assert all(set(each["sets"]) == {"c"} for each in numbers.values())
    shutil.rmtree("c")  # a set of the run's own, which another machine does not have
    code, _, err = run(f"eval mix --data.name text:{project}/other --json without.json")
    assert (code, "data.evaluate c" in err) == (0, True)
    assert "sets" not in json.loads(Path("without.json").read_text())
    assert run("eval mix")[0] == 2
    assert run(f"eval mix --data.name text:{project}/other --data.evaluate c=text:c")[0] == 2


def test_a_run_that_starts_from_another_takes_its_tokenizer(project: Path, tmp_path: Path) -> None:
    flags = BPE.replace("text:texts", "text:other")
    out = succeeded(f"{flags} --init-from lm --workdir {tmp_path}/next")
    assert "training a tokenizer" not in out
    assert (tmp_path / "next/assets/tokenizer.json").read_bytes() == (
        project / "lm/assets/tokenizer.json"
    ).read_bytes()
    assert "other text then" not in out


def test_a_bucket_holds_them(bucket: str, project: Path) -> None:
    workdir = path_of(f"{bucket}/run")
    files = {
        name: (project / "lm" / "assets" / name).read_bytes()
        for name in ("tokenizer.json", "assets.json")
    }
    files["chat_template.jinja"] = TEMPLATE.encode()
    entries = assets.write(workdir, files)
    assert assets.write(workdir, files) == entries
    run_assets = assets.find(workdir)
    assert run_assets is not None
    assert Subwords(path_of(str(run_assets.tokenizer))).vocab_size == 300
    template = templates.find(str(run_assets.tokenizer))
    assert template is not None
    assert template.source == TEMPLATE
    assert data_assets.end_ids(
        str(run_assets.tokenizer), Subwords(path_of(str(run_assets.tokenizer)))
    ) == {0}
    assets.write(
        workdir, {name: content for name, content in files.items() if name != "chat_template.jinja"}
    )
    assert templates.find(str(run_assets.tokenizer)) is None


def data_of(
    name: str, recipe: str = "lm-tiny", **fields: Any
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files that a run on such data keeps, and the content of assets.json."""
    config = RECIPES[recipe]()
    model: Any = config.model
    if config.data.task == "tokens":
        model = dataclasses.replace(model, seq_len=64, vocab_size=512)
    else:
        model = dataclasses.replace(model, num_classes=2)
    settings = DataConfig(name=name, batch_size=4, **fields)
    opened_data = data_sources.load(settings, model, seed=0, note=lambda line: None)
    files = data_assets.files_of(opened_data, settings, note=lambda line: None)
    return files, json.loads(files["assets.json"])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("text:texts", {}),
        ("text:texts", {"stream": True}),
        ("records:records", {"field": "code"}),
        ("hf:records", {"field": "code"}),
    ],
    ids=["text", "stream", "records", "hf"],
)
def test_every_kind_of_text_has_its_tokenizer(
    name: str, fields: dict[str, Any], project: Path
) -> None:
    (project / "records").mkdir(exist_ok=True)
    for split in ("train", "validation"):
        lines = (json.dumps({"code": f"{split} def self {i} value"}) for i in range(99))
        (project / "records" / f"{split}.jsonl").write_text("\n".join(lines))
    files, record = data_of(name, tokenizer="bpe:290", **fields)
    assert set(files) == {"tokenizer.json", "assets.json"}
    assert record["tokenizer"]["name"] == "bpe:290"
    files, record = data_of(name, **fields)
    assert set(files) == {"assets.json"}
    assert record["tokenizer"]["separator"] == {"text": None, "id": 0}


def test_a_mixture_and_text_with_noise_have_their_tokenizer(project: Path) -> None:
    tokenizer = str(project / "lm" / "assets" / "tokenizer.json")
    mix = ("a=text:texts:1", "b=text:other:2")
    files, _ = data_of("mix", mix=mix, tokenizer=tokenizer)
    assert files["tokenizer.json"] == Path(tokenizer).read_bytes()
    files, _ = data_of("text:texts", "ed-tiny", noise="infilling", tokenizer="bpe:290")
    assert set(files) == {"tokenizer.json", "assets.json"}


def test_token_ids_have_their_size_and_separator(project: Path) -> None:
    np.save("ids.npy", np.arange(4000, dtype=np.uint16) % 300)
    files, record = data_of("records:ids.npy", tokenizer="ids:300")
    assert set(files) == {"assets.json"}
    assert (record["tokenizer"]["name"], record["tokenizer"]["separator"]["id"]) == ("ids:300", 299)


def test_images_have_class_names_and_preprocessing(project: Path) -> None:
    for label in ("cat", "dog"):
        (project / "images" / label).mkdir(parents=True)
        for number in range(20):
            pixels = np.full((8, 8), 9 * number + len(label), np.uint8)
            Image.fromarray(pixels).save(project / "images" / label / f"{number}.png")
    files, record = data_of("images:images", "vit-digits")
    assert set(files) == {"assets.json"}
    assert record["class_names"] == ["cat", "dog"]
    assert {"fit", "mean", "std"} <= record["pixels"].keys()


def test_what_lies_beside_a_tokenizer_file_is_kept(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    shutil.copy(project / "lm" / "assets" / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "!"})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    file = folder / "tokenizer.json"
    eos = Subwords(file).find("!")
    assert eos is not None
    before = templates.find(str(file))
    files, record = data_of("text:texts", tokenizer=str(file))
    assert record["chat_template"]["tokens"] == {"bos_token": "<s>", "eos_token": "!"}
    assert record["tokenizer"]["ends"] == sorted([0, 7, 8, eos])
    assets.write(tmp_path / "run", files)
    shutil.rmtree(folder)
    copied = str(tmp_path / "run" / "assets" / "tokenizer.json")
    after = templates.find(copied)
    assert before is not None
    assert after is not None
    assert (after.source, after.tokens) == (before.source, before.tokens)
    assert data_assets.end_ids(copied, Subwords(Path(copied))) == {0, 7, 8, eos}


def test_a_broken_template_beside_the_tokenizer_does_not_end_a_run_on_text(
    project: Path, tmp_path: Path
) -> None:
    shutil.copy(project / "lm" / "assets" / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    files, _ = data_of("text:texts", tokenizer=str(tmp_path / "tokenizer.json"))
    assert set(files) == {"tokenizer.json", "assets.json"}
