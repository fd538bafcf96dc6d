"""A run keeps what its model needs: a workdir is used without its training data and the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.disk import path_of
from mupax.train import data as data_sources
from mupax.train.checkpoints import assets, layout
from mupax.train.config.data import DataConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.data.chats import templates
from mupax.train.data.text.tokenizer import Subwords
from mupax.train.reuse import trained
from tests.fixtures.commands import command, last_of_each_flag, output, refusal
from tests.fixtures.devices import one_device
from tests.fixtures.emulator import bucket, emulator
from tests.fixtures.generators import shared_generators
from tests.fixtures.idle_steps import idle_steps
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import VOCABULARY, untrained, working_folder

__all__ = [  # fixtures
    "bucket",
    "emulator",
    "idle_steps",
    "one_device",
    "shared_generators",
    "shared_programs",
    "untrained",
]

MODEL = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 48 --model.vocab-size 300"
)
BATCHES = "--data.batch-size 16 --data.eval-examples 32 --data.eval-batch-size 32"
TRAINING = (
    f"{BATCHES} --optimizer.warmup-steps 1 --steps 4 --checkpoint.every-steps 2 "
    "--log.no-tensorboard --log.no-samples"
)
BPE = f"train lm-tiny --data.name text:texts --data.tokenizer bpe:300 {MODEL} {TRAINING}"
FURTHER = "--resume --steps 6 --resume-change schedule"
PROMPT = "--prompt def --tokens 6 --temperature 0"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER = "assets/tokenizer.json"


def succeeded(*words: str) -> str:
    """Return what a command prints that ends well."""
    return output(last_of_each_flag(*words))


def write_texts(folder: Path, seed: int) -> None:
    """Write four texts, whose words depend on the seed: another seed makes another tokenizer."""
    folder.mkdir(exist_ok=True)
    choose = random.Random(seed)
    new_words = (f"{choose.choice(VOCABULARY)}{seed}{choose.choice(VOCABULARY)}" for _ in range(9))
    words = [*VOCABULARY, *new_words]
    for number in range(4):
        lines = (" ".join(choose.choices(words, k=9)) for _ in range(150))
        (folder / f"{seed}-{number}.txt").write_text("\n".join(lines))


def named(workdir: Path, step: int) -> assets.Entries:
    """Return the files that a checkpoint names."""
    return layout.read(workdir / "checkpoints" / str(step)).assets


def reads_its_tokenizer(workdir: str, step: int | None = None) -> bool:
    """Return whether the model of a run finds a tokenizer of the size that the run has."""
    return trained.open_model(Path(workdir), step).tokenizer().vocab_size == 300


@pytest.fixture(scope="module", autouse=True)
def project(
    tmp_path_factory: pytest.TempPathFactory,
    idle_steps: None,
    one_device: None,
    shared_programs: None,
) -> Iterator[Path]:
    """A folder with texts, conversations, and the run `lm` whose tokenizer was made from its texts."""
    with working_folder(tmp_path_factory.mktemp("project")) as path:
        write_texts(path / "texts", 0)
        write_texts(path / "other", 1)
        chats: list[str] = []
        for index in range(400):
            turns = [
                {"role": "user", "content": f"self {index}"},
                {"role": "assistant", "content": f"value {index % 7}"},
            ]
            chats.append(json.dumps({"messages": turns}))
        (path / "chat.jsonl").write_text("\n".join(chats))
        (path / "template.jinja").write_text(TEMPLATE)
        succeeded(BPE, "--workdir lm")
        yield path


@pytest.fixture
def elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workdir alone on another machine: no training data, an empty cache."""
    shutil.copytree(project / "lm", tmp_path / "lm")
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "lm"


@pytest.fixture
def grown_copy(project: Path, elsewhere: Path, tmp_path: Path) -> None:
    """A folder with the run and its texts, to which one was added, and an empty cache."""
    shutil.copytree(project / "texts", tmp_path / "texts")
    shutil.copy(project / "other" / "1-0.txt", tmp_path / "texts")


def test_every_manifest_names_the_files_with_size_and_digest(project: Path) -> None:
    workdir = project / "lm"
    entries = named(workdir, 2)
    assert entries == named(workdir, 4)
    assert set(entries) == {TOKENIZER, "assets/assets.json"}
    assert all((workdir / path).stat().st_size == size for path, (size, _) in entries.items())
    record = json.loads((workdir / "assets" / "assets.json").read_text())
    assert record["tokenizer"]["name"] == "bpe:300"
    assert record["tokenizer"]["separator"] == {"text": "<|endoftext|>", "id": 0}
    facts = json.loads((workdir / "config.json").read_text())["data"]
    key = Subwords(workdir / TOKENIZER).key
    assert record["tokenizer"]["key"] == facts["tokenizer"] == key


def test_a_copy_of_the_workdir_is_all_that_commands_need(project: Path, elsewhere: Path) -> None:
    write_texts(Path("new"), 1)
    with contextlib.chdir(project):
        text = succeeded("generate lm", PROMPT)
    assert succeeded("generate lm", PROMPT) == text
    succeeded("eval lm --data.name text:new --json new.json")
    assert json.loads(Path("new.json").read_text())["data_of_the_run"] is False
    succeeded("export lm --out exported")
    tokenizer = Path("lm", TOKENIZER).read_bytes()
    assert Path("exported/tokenizer.json").read_bytes() == tokenizer
    assert succeeded("generate exported", PROMPT) == text
    succeeded("convert lm --form plain --out plain")
    succeeded("grow lm --set depth=2 --out grown")
    shutil.rmtree("lm")
    for workdir in ("plain", "grown"):
        assert named(Path(workdir), 4) == named(project / "lm", 4)
        assert Path(workdir, TOKENIZER).read_bytes() == tokenizer
        assert reads_its_tokenizer(workdir)


def test_a_finetuned_run_is_all_that_commands_need(project: Path, elsewhere: Path) -> None:
    write_texts(Path("new"), 1)
    shutil.copy(project / "chat.jsonl", ".")
    shutil.copy(project / "template.jinja", ".")
    tokenizer = Path("lm", TOKENIZER).read_bytes()
    few = f"--steps 2 {BATCHES} --optimizer.warmup-steps 1 --log.no-tensorboard --log.no-samples"
    template = "--data.chat-template template.jinja"
    succeeded(f"finetune chat.jsonl --from lm {template} --workdir chat", few)
    files = ("assets.json", "tokenizer.json", "chat_template.jinja")
    assert set(named(Path("chat"), 2)) == {f"assets/{name}" for name in files}
    for folder in ("lm", "cache"):
        shutil.rmtree(folder)
    for file in ("chat.jsonl", "template.jinja"):
        Path(file).unlink()
    succeeded("generate chat", PROMPT)
    service = trained.open_model(Path("chat"))
    data = service.config.data
    chat_template = templates.find(data.tokenizer, data.chat_template)
    assert chat_template is not None
    assert chat_template.source == TEMPLATE
    succeeded("finetune new --from chat --workdir text", few)
    assert Path("text", TOKENIZER).read_bytes() == tokenizer


@pytest.mark.usefixtures("grown_copy")
def test_a_resumed_run_keeps_its_tokenizer_where_the_folder_has_grown(project: Path) -> None:
    assert "--resume-change data" in refusal(f"{BPE} --workdir lm {FURTHER}")
    out = succeeded(f"{BPE} --workdir lm {FURTHER} data")
    assert "training a tokenizer" not in out
    assert named(Path("lm"), 6) == named(Path("lm"), 4)
    for path in named(Path("lm"), 6):
        assert Path("lm", path).read_bytes() == (project / "lm" / path).read_bytes()


@pytest.mark.parametrize("damage", ["flipped", "missing", "cut"])
def test_a_damaged_or_missing_tokenizer_is_named(damage: str, elsewhere: Path) -> None:
    file = elsewhere / TOKENIZER
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        file.unlink()
    elif damage == "flipped":
        file.write_bytes(content)
    else:
        file.write_bytes(content[:-3])
    Path("text.txt").write_text("def self")
    for words in ("generate lm --prompt a", "finetune text.txt --from lm"):
        assert f"lm/{TOKENIZER}" in refusal(words)
    listed = command("checkpoints lm")
    assert listed.code == 1
    assert listed.out.count(TOKENIZER) == 2


@pytest.mark.usefixtures("grown_copy")
def test_what_is_lost_comes_back_when_the_run_goes_on_with_its_data(project: Path) -> None:
    shutil.rmtree("lm/assets")
    # Texts that make another tokenizer must not take the place of the lost one.
    assert f"lm/{TOKENIZER}" in refusal(f"{BPE} --workdir lm {FURTHER} data")
    assert not Path("lm/assets").exists()
    Path("texts/1-0.txt").unlink()
    succeeded(f"{BPE} --workdir lm --resume")
    assert Path("lm", TOKENIZER).read_bytes() == (project / "lm" / TOKENIZER).read_bytes()
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


@pytest.mark.usefixtures("grown_copy")
def test_a_run_of_an_older_version_is_read_from_the_cache_and_gets_its_files_when_it_goes_on(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_an_older_version(Path("lm"))
    # Nothing has its tokenizer any more.
    assert "lm/assets" in refusal("generate lm --prompt a --tokens 2")
    ignored = shutil.ignore_patterns("assets.json")
    shutil.copytree(project / "lm" / "assets", "lm/assets", ignore=ignored)
    assert reads_its_tokenizer("lm")
    shutil.rmtree("lm/assets")
    monkeypatch.setenv("MUPAX_DATA", str(project / "cache"))
    succeeded("generate lm", PROMPT)
    succeeded("export lm --out exported")
    assert Path("exported/tokenizer.json").is_file()
    Path("texts/1-0.txt").unlink()
    succeeded(f"{BPE} --workdir lm {FURTHER}")
    assert set(named(Path("lm"), 6)) == {TOKENIZER, "assets/assets.json"}
    shutil.rmtree("texts")
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    assert reads_its_tokenizer("lm", 4)
    succeeded("generate lm --step 6", PROMPT)


def test_a_branch_has_the_files_too(project: Path, elsewhere: Path) -> None:
    with contextlib.chdir(project):
        succeeded(f"{BPE} --workdir {elsewhere} --resume --resume-from 2")
    assert reads_its_tokenizer("lm/branches/4")
    succeeded("generate lm/branches/4", PROMPT)


def test_another_chat_template_leaves_earlier_checkpoints_theirs(
    project: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "chat"
    chat = f"train lm-tiny --data.name chat:chat.jsonl {MODEL} {TRAINING} --workdir {workdir}"
    succeeded(f"{chat} --data.chat-template template.jinja --steps 2")
    other = tmp_path / "other.jinja"
    other_source = TEMPLATE.replace("<|endoftext|>", "<|end|>")
    other.write_text(other_source)
    further = f"{chat} --data.chat-template {other} --resume --resume-change data schedule"
    succeeded(further)
    other.unlink()
    sources: list[str] = []
    for step in (2, 4):
        run_assets = assets.find(workdir, step)
        assert run_assets is not None
        assert run_assets.chat_template is not None
        sources.append(run_assets.chat_template.read_text())
    assert sources == [TEMPLATE, other_source]
    succeeded(further)  # the file of the template is gone, the run has it


def test_eval_reads_other_texts_by_the_tokenizer_of_the_run(project: Path, tmp_path: Path) -> None:
    texts = (project / "other" / "1-0.txt").read_text().splitlines()
    records = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "hf").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "hf" / f"{split}.jsonl").write_text(records)
    for other in (
        "text:other --data.tokenizer bpe:300",
        f"records:{tmp_path}/hf/train.jsonl",
        f"hf:{tmp_path}/hf",
        "chat:chat.jsonl --data.chat-template template.jinja",
    ):
        succeeded(f"eval lm --data.name {other}")
    assert "--data.tokenizer" in refusal("eval lm --data.name text:other --data.tokenizer bpe:290")


def test_eval_reads_a_text_in_place_of_the_mixture(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = f"a=text:{project}/texts:0.7 b=text:{project}/other:0.3"
    mix = f"--data.mix {sources} --data.evaluate c=text:{tmp_path}/c"
    shutil.copytree(project / "texts", tmp_path / "c")
    succeeded(f"train lm-tiny {mix} {MODEL} {TRAINING} --steps 2 --workdir {tmp_path}/mix")
    monkeypatch.chdir(tmp_path)
    other = f"--data.name text:{project}/other"

    def evaluated(flags: str) -> dict[str, Any]:
        succeeded(f"eval mix {flags} --json numbers.json")
        numbers = json.loads(Path("numbers.json").read_text())
        assert set(numbers["sets"]) == {"c"}
        return numbers

    own = evaluated("")
    assert (own["data"], own["data_of_the_run"]) == ("mix", True)
    text = evaluated(other)
    assert (text["data"], text["data_of_the_run"]) == (f"text:{project}/other", False)
    assert text["loss"] != own["loss"]
    mixture = evaluated(f"--data.mix x=text:{project}/other:1")
    assert (mixture["data"], mixture["data_of_the_run"]) == ("mix", False)
    shutil.rmtree("c")  # a set of the run's own, which another machine does not have
    without = command(f"eval mix {other} --json without.json")
    assert without.code == 0
    assert "data.evaluate c" in without.err
    assert "sets" not in json.loads(Path("without.json").read_text())
    refusal("eval mix")
    refusal(f"eval mix {other} --data.evaluate c=text:c")


def test_a_run_that_starts_from_another_takes_its_tokenizer(
    project: Path, untrained: list, tmp_path: Path
) -> None:
    flags = BPE.replace("text:texts", "text:other")
    out = succeeded(f"{flags} --init-from lm --workdir {tmp_path}/next")
    assert "training a tokenizer" not in out
    assert "other text then" not in out
    tokenizer = (project / "lm" / TOKENIZER).read_bytes()
    assert (tmp_path / "next" / TOKENIZER).read_bytes() == tokenizer


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
    assert assets.end_ids(
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
    files = assets.files_of(opened_data, settings, note=lambda line: None)
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
    assert assets.end_ids(copied, Subwords(Path(copied))) == {0, 7, 8, eos}


def test_a_broken_template_beside_the_tokenizer_does_not_end_a_run_on_text(
    project: Path, tmp_path: Path
) -> None:
    shutil.copy(project / "lm" / "assets" / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    files, _ = data_of("text:texts", tokenizer=str(tmp_path / "tokenizer.json"))
    assert set(files) == {"tokenizer.json", "assets.json"}
