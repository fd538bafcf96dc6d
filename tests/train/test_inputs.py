"""What becomes of right and wrong inputs: every row of inputs.md, with its exit code and what it says.

`python -m tests.train.test_inputs` writes the parts of the page that follow from the table of commands and from what the fields of
a config declare.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from safetensors.numpy import save
from tokenizers import Tokenizer, models, pre_tokenizers

from mupax import command_line
from mupax.__main__ import main
from mupax.commands import table
from mupax.config_fields import affects_of
from mupax.train.config.cli import Command
from mupax.train.config.data import PixelsConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.reuse import source
from mupax.train.reuse.huggingface import files
from mupax.train.reuse.image_input import ImageInput
from mupax.zoo.configs import DecoderConfig, ViTConfig
from mupax.zoo.definition import definition
from tests.fixtures.generators import shared_generators
from tests.fixtures.hub import model_hub
from tests.fixtures.programs import shared_programs

__all__ = ["shared_generators", "shared_programs"]  # fixtures

PAGE = Path(__file__).with_name("inputs.md")
TEXTS = [f"document {i} says {'word ' * (i % 7 + 20)}" for i in range(60)]
ROW = re.compile(r"^\| `(.+)` \| (\d) \| (.*) \|$", re.MULTILINE)


def lines(key: str = "text", **last: Any) -> str:
    """Records, a line each; the last one as given."""
    return "".join(
        json.dumps(row) + "\n"
        for row in [*({key: text} for text in TEXTS), *([last] if last else [])]
    )


def texts_and_records() -> dict[str, str | bytes]:
    """Files by name, whole and broken."""
    archive, records = io.BytesIO(), lines().encode()
    zipfile.ZipFile(archive, "w").writestr("word/document.xml", "<w>hello</w>" * 50)
    ids = np.random.default_rng(0).integers(0, 300, 4000).astype("<u2")
    return {
        **{f"texts/{i}.txt": "\n".join(TEXTS[5 * i : 5 * i + 5]) for i in range(12)},
        "good.jsonl": records,
        "good.jsonl.gz": gzip.compress(records),
        "bom.jsonl": b"\xef\xbb\xbf" + records,
        "crlf.jsonl": records.replace(b"\n", b"\r\n"),
        "blank.jsonl": records.replace(b"\n", b"\n\n"),
        "cut.jsonl": records + b'{"text": "half',
        "other-field.jsonl": lines(words="x"),
        "number.jsonl": lines(text=5),
        "null.jsonl": lines(text=None),
        "latin.jsonl": records + '{"text": "café"}\n'.encode("latin1"),
        "cut.jsonl.gz": gzip.compress(records)[:-40],
        "not-zipped.jsonl.gz": records,
        "two.jsonl": '{"text": "a b c"}\n{"text": "d e f"}\n',
        "no-words.jsonl": '{"text": ""}\n{"text": ""}\n',
        "empty.jsonl": "",
        "list.json": json.dumps([{"text": text} for text in TEXTS]),
        "over-lines.json": json.dumps({"text": TEXTS[0]}, indent=2),
        "table.csv": "id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS)),
        "empty.txt": "",
        "short.txt": "hello " * 20,
        "latin.txt": ("café " * 400).encode("latin1"),
        "utf16.txt": ("hello there " * 500).encode("utf-16"),
        "word.docx": archive.getvalue(),
        "bytes.txt": bytes(range(256)) * 20,
        "mixed/README.md": "what this is\n" * 30,
        "mixed/a.jsonl": records,
        "mixed/picture.png": b"\x89PNG\0",
        "ids.bin": ids.tobytes(),
        "odd.bin": ids.tobytes() + b"x",
        "plain.json": '{"a": 1}',
        "cut.yaml": "recipe: lm-tiny\nmodel: {depth: ",
        "typo.yaml": "recipe: lm-tiny\nstpes: 5\n",
        "no-recipe.yaml": "steps: 5\n",
        "images.yaml": "recipe: vit-digits\n",
    }


def weights() -> dict[str, str | bytes]:
    """Folders of Hugging Face in which something is wrong."""
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": 300,
    }
    llama = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 300,
    }
    configs: dict[str, Any] = {
        "a-list": [1, 2],
        "no-type": {"a": 1},
        "unknown": {"model_type": "mamba"},
        "no-weights": gpt2,
        "pickle": gpt2,
        "cut-weights": gpt2,
        "other-weights": gpt2,
        "quantized": {**gpt2, "quantization_config": {"quant_method": "gptq"}},
        "yarn": {
            **llama,
            "intermediate_size": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
    }
    return {
        **{f"{name}/config.json": json.dumps(fields) for name, fields in configs.items()},
        "cut-config/config.json": '{"model_type": "gp',
        "pickle/pytorch_model.bin": b"\x80\x04x",
        "cut-weights/model.safetensors": b"\x10\x00",
        "other-weights/model.safetensors": save({"wte.weight": np.zeros((7, 8), np.float32)}),
    }


def make() -> None:
    """All files and folders that the page names, here."""
    for name, content in {**texts_and_records(), **weights()}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    Path("nothing").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), "body.parquet")
    Path("cut.parquet").write_bytes(Path("body.parquet").read_bytes()[:-30])
    ids = np.fromfile("ids.bin", "<u2")
    for name, array in {"ids": ids, "two-rows": ids.reshape(2, -1), "float": ids / 2}.items():
        np.save(f"{name}.npy", array)
    words = Tokenizer(
        models.WordLevel({"[END]": 0, "[UNK]": 1, "word": 2, "says": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["[END]"])
    words.save("words.json")
    folders = {
        "pictures": "ab",
        "one-class": "a",
        "other-classes": "cd",
        "three-classes": "abc",
        "capitals": "AB",
    }
    for name, classes in folders.items():
        for label in classes:
            Path(name, label).mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (8, 8), (9 * i, 0, 0)).save(f"{name}/{label}/{i}.png")
    Path("no-images/a").mkdir(parents=True)
    Path("no-images/b").mkdir()
    shutil.copytree("pictures", "broken")
    Path("broken/a/0.png").write_bytes(Path("pictures/a/0.png").read_bytes()[:40])
    sizes: dict[str, Any] = {"width": 8, "depth": 1, "num_heads": 2}
    decoder = DecoderConfig(**sizes, vocab_size=300, seq_len=16, tied=True)
    vit = ViTConfig(**sizes, image_size=8, patch_size=4, channels=3, num_classes=2, pool="cls")
    random, images = np.random.default_rng(0), ImageInput(("a", "b"), PixelsConfig(fit="squash"))
    for name, model, image_input in (("gpt", decoder, None), ("vit", vit, images)):
        shapes = {path: leaf.shape for path, leaf in definition(model).abstract.items()}
        params = {
            path: random.normal(0, 0.1, shape).astype(np.float32) for path, shape in shapes.items()
        }
        model_source = source.WeightsSource(
            model, params, dict.fromkeys(params, np.ones(())), {}, [], images=image_input
        )
        files.write_huggingface(model_source, Path(name), "float32")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("inputs")
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(path),
        model_hub(path / "home") as hub,
    ):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        make()
        for name in ("vit", "gpt"):
            hub.add(f"me/{name}", Path(name))
        hub.add("me/secret", Path("vit"), private=True)
        hub.add("me/pickle", Path("pickle"))
        yield


def outcome(words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line without its `mupax`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(words))
    return code, out.getvalue(), err.getvalue()


def parts(text: str) -> list[str]:
    """What a row says, without what it leaves out."""
    return [part for part in re.split(" ?… ?", text.replace("\\|", "|")) if part]


ROWS = [(words, int(code), parts(text)) for words, code, text in ROW.findall(PAGE.read_text())]


TAKES = {int: "a whole number", float: "a number", str: "text", bool: "no value", NoneType: "None"}
ON_RESUME = {"refused": "is refused", "announced": "prints old -> new", "silent": "says nothing"}


def flags_of_runs() -> dict[str, Any]:
    """Every flag of a recipe, over the families of models, to its type with annotations."""
    hints: dict[str, Any] = {}
    for recipe in ("lm-tiny", "vit-digits", "ed-tiny"):
        for field in command_line.flag_fields(Command(config=RECIPES[recipe]())):
            hints.setdefault(field.names[0], field.hint)
    return hints


def takes(hint: Any) -> str:
    """What a flag of a type takes."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        return takes(arguments[0])
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if get_origin(hint) is tuple:
        return f"several, each {takes(arguments[0])}"
    return TAKES[hint] if not arguments else " or ".join(map(takes, arguments))


def fields_table() -> list[str]:
    """The table of flags, by what their fields declare."""
    lines = [
        "## The flags of a run",
        "",
        "| flag | takes | a resume with another value | names a point of a sweep |",
    ]
    lines.append("|---|---|---|---|")
    for flag, hint in flags_of_runs().items():
        affects = affects_of(hint)
        resume = ON_RESUME[affects.consequence.on_resume] if affects else ""
        point = ("yes" if affects.consequence.names_point else "no") if affects else ""
        lines.append(f"| `{flag}` | {takes(hint)} | {resume} | {point} |")
    return lines


def typed_table() -> list[str]:
    """Lines that are typed, with what they say: values of another type, and misspelt commands."""
    lines = [
        "## Values of another kind, and misspelt commands",
        "",
        "| typed | code | it says |",
        "|---|---|---|",
    ]
    kinds: set[str] = set()
    for flag, hint in flags_of_runs().items():
        kind = takes(hint)
        choices = sorted(re.findall(r"`(.*?)`", kind))
        kind = "a choice" if choices else kind
        if kind in kinds or ("number" not in kind and not choices) or "several" in kind:
            continue
        kinds.add(kind)
        needs = f"one of {', '.join(map(repr, choices))}" if choices else kind
        lines.append(f"| `train lm-tiny {flag} x` | 2 | {flag} needs {needs}, not … |")
    for command in table.commands().values():
        lines.append(
            f"| `{command.name[:-1]}` | 2 | no command is named {command.name[:-1]!r}; did you mean {command.name}? … |"
        )
        for row in command.subcommands:
            wrong = f"no command is named {row.name[:-1]!r}; did you mean {row.name}? …"
            if command.run is not None:
                wrong = f"mupax {command.name} has no {row.name[:-1]!r}; did you mean `mupax {command.name} {row.name}`?"
            lines.append(f"| `{command.name} {row.name[:-1]}` | 2 | {wrong} |")
    return lines


def page(text: str) -> str:
    """The text of inputs.md with the parts that follow from the code as the code is."""
    begin = "<!-- of the code: begin -->\n"
    end = "<!-- of the code: end -->"
    parts_of_code = "\n".join(["", *typed_table(), "", *fields_table(), ""])
    return f"{text.partition(begin)[0]}{begin}{parts_of_code}\n{end}{text.partition(end)[2]}"


def test_the_page_has_what_the_code_declares() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "python -m tests.train.test_inputs writes it anew"


def test_control_a_field_that_changed_is_another_page() -> None:
    text = PAGE.read_text()
    row = "| `--steps` | a whole number | prints old -> new | yes |"
    assert row in text
    assert page(text.replace(row, row.replace("yes", "no"))) == text != text.replace(row, "")


def test_there_are_a_hundred() -> None:
    assert len(ROWS) == len({words for words, *_ in ROWS}) >= 100
    assert {code for _, code, _ in ROWS} == {0, 2}


@pytest.mark.parametrize(("words", "code", "says"), ROWS, ids=[words for words, *_ in ROWS])
def test_an_input_has_its_exit_code_and_message(words: str, code: int, says: list[str]) -> None:
    exit_code, out, err = outcome(words)
    output = " ".join((err if code else out + err).split()).replace(f"{Path.cwd()}/", "")
    assert exit_code == code, output
    for part in says:
        assert part in output
    assert "Traceback" not in out + err
    assert len(err.splitlines()) <= 10
    assert not code or err.count("error: ") == 1


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
