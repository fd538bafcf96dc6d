"""What the documents tell a person to type works: shell lines and Python blocks are read from them and run.

Cheap variants stand in for what is slow: a training line gets `--dry-run`, a `make` line `make --dry-run`. Everything else runs
as written, in this process, in a folder with what `make train` leaves. Paths and modules that the documents name exist.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import tomllib
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tyro
from PIL import Image

from mupax import __main__ as mupax
from mupax import presets
from mupax.presets.tuned import find
from mupax.train.reuse.serve import server
from scripts.pages import published
from tests.fixtures.emulator import bucket, emulator
from tests.fixtures.programs import shared_programs
from tests.presets.verify import dumps

__all__ = ["bucket", "emulator", "shared_programs"]  # fixtures

ROOT = Path(__file__).resolve().parent.parent
OF_THE_SITE = {"docs/index.md"}
"""Pages that only include the documents of the root."""
PAGES = sorted(
    path
    for path in (page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
    if path not in OF_THE_SITE and not path.startswith(("docs/notebooks/", "docs/reference/api.md"))
)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *PAGES)
MODULES = tuple(
    name for name in DOCUMENTS if name.startswith(("docs/howto/add_a", "docs/howto/extend.md"))
)
"""Pages whose Python is a module to save, which a test beside what is added does."""
OWN_TEST = ("docs/howto/add_a_metric.md",)
"""Pages whose commands need such a module, and are run by its test."""
FENCE = re.compile(r"^```(\{?\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS_NOTHING = ("--dry-run", "--print-config", "--help")
AS_A_SCAN = ("--model.compute.layers", "scan")
"""Compiles in a quarter of the time that twelve layers one by one take."""
FITS = ("--data.batch-size", "8")
"""For where a dry run would compile what fits in less memory, which tests/train/core/costs/test_fit.py has."""
TRAINS = (
    "train",
    "finetune",
    "sweep",
    "tune",
    "transfer",
    "plan",
    "check",
    "compile",
    "push",
    "convert",
)
"""Commands that get `--dry-run`. The others are cheap, and run as written, most on what `make train` leaves after two steps."""


def blocks(document: str, language: str) -> list[str]:
    fences = FENCE.findall((ROOT / document).read_text())
    assert all(name for name, _ in fences), f"{document} has a fenced block without a language"
    return [body for name, body in fences if name == language]


def shell_lines() -> list[str]:
    documents = [name for name in DOCUMENTS if name not in OWN_TEST]
    texts = [
        block.replace("\\\n", " ") for document in documents for block in blocks(document, "sh")
    ]
    return list(
        dict.fromkeys(line.strip() for text in texts for line in text.splitlines() if line.strip())
    )


@functools.cache
def files_of_other_programs() -> dict[str, str]:
    """Configs of other programs, and dumps of a model at two widths, by name."""
    files = {path.name: path.read_text() for path in dumps.CONFIGS.iterdir()}
    files["mlp.json"] = json.dumps(json.loads(files["mup.json"])["mlp adamw"][1])
    for name, width in (("small", 16), ("large", 64)):
        model = dumps.dump(
            presets.get("mup"), dumps.decoder(width, heads=width // 4), dumps.decoder(16)
        )
        files[f"{name}.json"] = json.dumps(model)
    return files


@contextlib.contextmanager
def folders_of_the_reader(path: Path) -> Iterator[None]:
    """The empty folder a person types in, with the text, records and images the documents speak of."""
    (path / "tuned").mkdir()
    # What the sweep before would have left.
    saved = json.loads((ROOT / "presets" / "tuned" / "mup.lm-python-v1.json").read_text())
    (path / "tuned" / "mup.my-lm.json").write_text(json.dumps({**saved, "name": "my-lm"}))
    (path / "my_texts").mkdir()
    (path / "my_texts" / "a.txt").write_text("Something to read. " * 2000)
    (path / "my_records").mkdir()
    records = [{"body": f"Something to read, {i}. " * 20} for i in range(60)]
    (path / "my_records" / "a.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    (path / "my_talks").mkdir()
    talks = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}]
        for i in range(60)
    ]
    (path / "my_talks" / "a.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    )
    (path / "chatml.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    (path / "my_ids").mkdir()
    for name in ("train", "val"):
        np.arange(2000, dtype=np.uint16).tofile(path / "my_ids" / f"{name}.bin")
    for name in ("cats", "dogs"):
        (path / "my_images" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (12, 12), (40 * number, 100, 0)).save(
                path / "my_images" / name / f"{number}.png"
            )
    (path / "my_model.py").write_text(blocks("docs/concepts/roles.md", "python")[0])
    for name, text in files_of_other_programs().items():
        (path / name).write_text(text)
    with contextlib.chdir(path):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `make train` and two recipes leave, but for the number of steps and how layers compile, and an export."""
    folder = tmp_path_factory.mktemp("trained")
    words = "--steps 2 --optimizer.warmup-steps 1 --data.batch-size 8 --data.eval-examples 8 --log.no-samples"
    with folders_of_the_reader(folder), contextlib.redirect_stdout(io.StringIO()):
        for recipe in ("lm-laptop", "ed-tiny", "vit-digits"):
            assert (
                mupax.main(
                    ["train", recipe, *words.split(), *AS_A_SCAN, "--workdir", f"runs/{recipe}"]
                )
                == 0
            )
        assert mupax.main(["export", "runs/lm-laptop", "--out", "exported"]) == 0
        tokenizer = ["--size", "300", "--out", "my_tokenizer.json"]
        assert mupax.main(["data", "tokenizer", "text:my_texts", *tokenizer]) == 0
    return folder


def copied(trained: Path, folder: Path, text: str) -> None:
    """Puts into `folder` what the text of a command or block reads and does not write."""
    for name in ("runs", "exported"):
        if re.search(rf"(?<!workdir )(?<!out ){name}\b|train --resume --workdir {name}\b", text):
            shutil.copytree(trained / name, folder / name)
    if re.search(r"(?<!out )my_tokenizer\.json", text):
        shutil.copy(trained / "my_tokenizer.json", folder)
    for name in re.findall(r"--from (docs/[\w/-]+)", text):
        shutil.copytree(ROOT / name, folder / name)


def run(line: str) -> int:
    """Exit code of one command of the documents."""
    words = shlex.split(line.removesuffix("&"))
    while "=" in words[0]:
        variable, value = words.pop(0).split("=", 1)
        assert value in os.environ[variable], f"the tests run without {variable}={value}"
    if words[0] == "make":
        assert len(words) > 1
        return subprocess.run(
            ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, check=False
        ).returncode
    if words[0].startswith("scripts/"):
        assert "--dry-run" in words
        return subprocess.run(words, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode
    if words[:2] == ["pip", "install"]:
        extra = words[2].removeprefix("mupax[").removesuffix("]")
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        return int(f"mupax[{extra}]" != words[2] or extra not in extras)
    if words[0] == "mpirun":
        words = words[words.index("mupax") :]
    # Ray and SkyPilot are asked by `make schedulers`.
    if words[:2] == ["python", "scripts/launch/ray_train.py"]:
        words = ["mupax", "train", *words[words.index("--") + 1 :], "--print-config"]
    if words[0] == "sky":
        told = dict(word.split("=", 1) for word in words if "=" in word)
        words = ["mupax", "train", *shlex.split(told["TRAIN"]), "--print-config"]
    if words[:2] == ["python", "-m"] and words[2].startswith("examples."):
        tyro.cli(importlib.import_module(words[2]).main, args=[*words[3:], "--steps", "3"])
        return 0
    if words[:2] == ["python", "-m"]:
        words = ["mupax", *words[2:]]
    assert words[0] == "mupax", (
        f"the documents say {line!r}, and nothing here knows how to check it"
    )
    if words[1] == "serve":
        with unittest.mock.patch.object(server.Server, "serve_forever"):
            return mupax.main([*words[1:], "--port", "0"])
    from_evidence = (
        words[1:3] == ["plan", "--model"] and "--from" not in words
    )  # takes no flag of a recipe
    if words[1] in TRAINS and not set(words) & set(RUNS_NOTHING) and not from_evidence:
        words += ["--dry-run", *AS_A_SCAN]
    elif words[1:3] == ["presets", "dynamics"]:
        words += ["--dry-run"]
    elif "gpt2-c4" in words:
        words += [*AS_A_SCAN, *FITS]
    try:
        return mupax.main(words[1:])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_documents_have_commands():
    assert {"make train", "make test"} <= set(shell_lines())


@pytest.mark.parametrize("line", shell_lines())
def test_a_command_works(line: str, tmp_path: Path, trained: Path, request: pytest.FixtureRequest):
    if line.startswith("mupax ") and "gs://bucket" in line:
        line = line.replace("gs://bucket", request.getfixturevalue("bucket"))
    shown, errors = io.StringIO(), io.StringIO()
    copied(trained, tmp_path, line)
    with (
        folders_of_the_reader(tmp_path),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(errors),
    ):
        code = run(line)
    assert code == 0, f"{line}\n{shown.getvalue()[-2000:]}\n{errors.getvalue()[-2000:]}"
    blank = (
        line.startswith(("make ", "scripts/", "pip ")) or " generate " in line
    )  # after two steps a model writes spaces
    assert blank or shown.getvalue().strip(), f"{line} says nothing"


@pytest.mark.parametrize(
    "line",
    [
        "python -m train lm-tiny --no-such-flag 1",
        "mupax presets table no-such --model gpt2",
        "make no-such",
    ],
)
def test_control_a_wrong_command_fails(line: str, tmp_path: Path):
    with folders_of_the_reader(tmp_path), contextlib.redirect_stderr(io.StringIO()):
        assert run(line) != 0


@pytest.mark.parametrize(
    "document", [name for name in DOCUMENTS if blocks(name, "python") and name not in MODULES]
)
def test_python_blocks_run(document: str, tmp_path: Path, trained: Path):
    for block in blocks(document, "python"):
        copied(trained, tmp_path, block)
        with contextlib.chdir(tmp_path):
            exec(compile(block, document, "exec"), {"__name__": "__main__"})


def test_presets_need_neither_our_models_nor_our_loop():
    longest_lines = 30
    examples = [
        block
        for document in ("README.md", "docs/howto/other_code.md")
        for block in blocks(document, "python")
        if "mup.scales(" in block
    ]
    assert [("nnx" in block) for block in examples] == [False, True]
    for block in examples:
        # The formatter adds blank ones.
        assert len([line for line in block.splitlines() if line.strip()]) <= longest_lines
        assert not re.search(r"^\s*from mupax(\.| import )(zoo|train)\b", block, re.MULTILINE)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


NAMED = re.compile(
    r"\b(?:\w[\w.-]*/)+[\w.-]+\.(?:py|sh|json|jsonl|md|png|yaml)\b|\bmupax(?:\.\w+)+"
)
"""Paths with a folder and modules, in prose, tables and code."""
ELSEWHERE = ("runs/", "splash_attention/")
"""What a run writes, and JAX's own kernels in what the compiler says."""


def missing(document: str, text: str) -> list[str]:
    """What the text of a document (by its path from the root) names and is not there."""
    gone = []
    elsewhere = in_other_repositories() if document == "docs/reference/tuned.md" else set()
    for name in NAMED.findall(re.sub(r"^(---|\+\+\+) [ab]/", "", text, flags=re.MULTILINE)):
        if name.startswith("mupax.") and not name.endswith((".py", ".md")):
            with contextlib.suppress(AttributeError, ImportError):
                pkgutil.resolve_name(name)
                continue
            with contextlib.suppress(ImportError):  # there, and needs what an extra installs
                if importlib.util.find_spec(name):
                    continue
            gone.append(name)
        elif (
            name not in elsewhere
            and not name.startswith(ELSEWHERE)
            and not any((folder / name).exists() for folder in places(document))
        ):
            gone.append(name)
    return gone


def in_other_repositories() -> set[str]:
    """Return the files that published tuned presets name as their sources, at a commit of another repository."""
    texts = [path.read_text() for path in find.PUBLISHED.glob("*.json")]
    texts += [left.looked_at for left in published.LEFT_OUT]
    return set(NAMED.findall("\n".join(texts)))


def places(document: str) -> tuple[Path, ...]:
    """Folders that the paths of a document start from; a field of a config names its test from `tests/`."""
    return ROOT, ROOT / "docs", (ROOT / document).parent, ROOT / "tests"


@pytest.mark.parametrize("document", sorted({*DOCUMENTS, "CHANGELOG.md"}))
def test_files_and_modules_named_in_the_documents_exist(document: str):
    assert missing(document, (ROOT / document).read_text()) == []


def test_control_a_moved_file_is_missed():
    text = "`train/loop.py`, `train/run/loop.py:12`, [x](docs/howto/running.md), mupax.train.loop and `mupax.train.run.loop`"
    assert missing("README.md", text) == ["train/loop.py", "mupax.train.loop"]
