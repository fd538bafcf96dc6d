"""Shell lines and Python blocks of the documents run, in a folder with what `make train` leaves.

Training lines get `--dry-run` and `make` lines `make --dry-run`. Everything else runs as written,
in this process. Paths and modules that the documents name exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from PIL import Image

from mupax import __main__ as mupax
from mupax import presets
from mupax.presets.tuned import find
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.core.costs import fit
from mupax.train.core.program import Program
from mupax.train.reuse.serve import server
from scripts.pages import published
from tests.fixtures.devices import one_device
from tests.fixtures.emulator import bucket, emulator
from tests.fixtures.idle_steps import steps_idle
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import without_loss_plot
from tests.presets.verify import dumps

__all__ = ["bucket", "emulator", "one_device", "shared_programs"]  # fixtures

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("docs/index.md", "docs/notebooks/", "docs/reference/api.md")
"""Pages that include other documents, or are run by a test of their own."""
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
PAGES = [page for page in PAGES if not page.startswith(GENERATED)]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *PAGES)
MODULES = ("docs/howto/add_a", "docs/howto/extend.md")
"""Beginnings of pages whose Python is a module to save, which tests/test_pages.py runs."""
OWN_TEST = ("docs/howto/add_a_metric.md",)
"""Pages whose commands need such a module, and are run by its test."""
FENCE = re.compile(r"^```(\{?\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS_NOTHING = {"--dry-run", "--print-config", "--help"}
TRAINS = {
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
}
"""Commands that get `--dry-run`. The others are cheap and run as written."""


def blocks(document: str, language: str) -> list[str]:
    fences = FENCE.findall((ROOT / document).read_text())
    assert all(name for name, _ in fences), f"{document} has a fenced block without a language"
    return [body for name, body in fences if name == language]


def shell_lines() -> list[str]:
    lines: list[str] = []
    for document in DOCUMENTS:
        if document not in OWN_TEST:
            text = "\n".join(blocks(document, "sh")).replace("\\\n", " ")
            lines += [line.strip() for line in text.splitlines() if line.strip()]
    return list(dict.fromkeys(lines))


def python_documents() -> list[str]:
    names = [name for name in DOCUMENTS if not name.startswith(MODULES)]
    return [name for name in names if blocks(name, "python")]


@pytest.fixture(scope="module", autouse=True)
def quick_recipes() -> Iterator[None]:
    """Give recipes small batches, and layers in a scan, which compiles four times as fast."""

    def quick(recipe: Callable[[], Config]) -> Callable[[], Config]:
        config = recipe()
        model: Any = config.model
        compute = dataclasses.replace(model.compute, layers="scan")
        # GPT-2 at its own size does not fit, and a dry run compiles what would.
        sizes = {"width": 64, "num_heads": 2, "seq_len": 64} if config.recipe == "gpt2-c4" else {}
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(model, compute=compute, **sizes),
            data=dataclasses.replace(config.data, batch_size=8, eval_examples=8),
            log=dataclasses.replace(config.log, samples=False),
        )
        return functools.wraps(recipe)(lambda: config)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("lm-laptop", "lm-tiny", "vit-digits", "ed-tiny", "gpt2-c4"):
            patch.setitem(RECIPES, name, quick(RECIPES[name]))
        yield


def structure(value: Any) -> Any:
    """Return a config without its numbers: of a number, whether it is zero."""
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return type(value), tuple(structure(field) for field in fields)
    if isinstance(value, int | float):
        return value != 0
    return value


@pytest.fixture(scope="module", autouse=True)
def steps_traced_once() -> Iterator[None]:
    """Dry runs trace their training step, once for models that differ in sizes alone.

    The memory that they show is estimated from shapes. tests/train/core/costs/test_fit.py compiles
    steps of dry runs.
    """
    traced: set[Any] = set()

    def traced_needs(program: Program) -> fit.MemoryEstimate:
        config = program.config
        key = structure(config.model), config.optimizer.name, config.mesh, program.trained
        if key not in traced:
            program.trace_train()
            traced.add(key)
        return fit.needs_by_shapes(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "needs", traced_needs)
        yield


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


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def reader_folder(path: Path) -> Iterator[None]:
    """Work in the folder of a reader, with the text, records and images of the documents."""
    (path / "tuned").mkdir()
    # A sweep of the documents saves it.
    saved = json.loads((ROOT / "presets" / "tuned" / "mup.lm-python-v1.json").read_text())
    (path / "tuned" / "mup.my-lm.json").write_text(json.dumps({**saved, "name": "my-lm"}))

    (path / "my_texts").mkdir()
    (path / "my_texts" / "a.txt").write_text("Something to read. " * 2000)
    records = [{"body": f"Something to read, {number}. " * 20} for number in range(60)]
    write_lines(path / "my_records" / "a.jsonl", records)
    talks = []
    for number in range(60):
        question = {"role": "user", "content": f"{number}?"}
        answer = {"role": "assistant", "content": f"{number}."}
        talks.append({"messages": [question, answer]})
    write_lines(path / "my_talks" / "a.jsonl", talks)
    (path / "chatml.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    (path / "my_ids").mkdir()
    for name in ("train", "val"):
        np.arange(2000, dtype=np.uint16).tofile(path / "my_ids" / f"{name}.bin")
    for name in ("cats", "dogs"):
        folder = path / "my_images" / name
        folder.mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (12, 12), (40 * number, 100, 0)).save(folder / f"{number}.png")

    (path / "my_model.py").write_text(blocks("docs/concepts/roles.md", "python")[0])
    for name, text in files_of_other_programs().items():
        (path / name).write_text(text)
    with contextlib.chdir(path):
        yield


@pytest.fixture(scope="module")
def trained(
    quick_recipes: None, one_device: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder with what `make train` leaves after two steps, two recipes untrained, and an export."""
    folder = tmp_path_factory.mktemp("trained")

    def run_recipe(recipe: str) -> None:
        steps = "--steps 2 --optimizer.warmup-steps 1"
        assert mupax.main(f"train {recipe} {steps} --workdir runs/{recipe}".split()) == 0

    silent = contextlib.redirect_stdout(io.StringIO())
    with reader_folder(folder), without_loss_plot(), silent:
        run_recipe("lm-laptop")
        with steps_idle():
            run_recipe("ed-tiny")
            run_recipe("vit-digits")
        for command in (
            "export runs/lm-laptop --out exported",
            "data tokenizer text:my_texts --size 300 --out my_tokenizer.json",
        ):
            assert mupax.main(command.split()) == 0
    return folder


def copy_read(trained: Path, folder: Path, text: str) -> None:
    """Copy what a command or block reads and does not write."""
    for name in ("runs", "exported"):
        if re.search(rf"(?<!workdir )(?<!out ){name}\b|train --resume --workdir {name}\b", text):
            shutil.copytree(trained / name, folder / name)
    if re.search(r"(?<!out )my_tokenizer\.json", text):
        shutil.copy(trained / "my_tokenizer.json", folder)
    for name in re.findall(r"--from (docs/[\w/-]+)", text):
        shutil.copytree(ROOT / name, folder / name)


def run(line: str) -> int:
    """Return the exit code of one command of the documents."""
    words = shlex.split(line.removesuffix("&"))
    while "=" in words[0]:
        variable, value = words.pop(0).split("=", 1)
        assert value in os.environ[variable], f"the tests run without {variable}={value}"
    match words:
        case ["make", _, *_]:
            command = ["make", "--dry-run", *words[1:]]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
            return done.returncode
        case ["pip", "install", package]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            return (
                0
                if package in {f"mupax[{extra}]" for extra in project["optional-dependencies"]}
                else 1
            )
        case ["python", "-m", module, *flags] if module.startswith("examples."):
            tyro.cli(importlib.import_module(module).main, args=[*flags, "--steps", "3"])
            return 0
        case [script, *_] if script.startswith("scripts/"):
            assert "--dry-run" in words
            done = subprocess.run(words, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
            return done.returncode
    try:
        return run_mupax(mupax_words(words))
    except SystemExit as stop:
        return int(stop.code or 0)


def mupax_words(words: list[str]) -> list[str]:
    """Return the words after `mupax` of a command that starts it."""
    match words:
        case ["mpirun", *_]:
            return words[words.index("mupax") + 1 :]
        case ["sky", *_]:  # SkyPilot and Ray are asked by `make schedulers`
            variables = dict(word.split("=", 1) for word in words if "=" in word)
            return ["train", *shlex.split(variables["TRAIN"]), "--print-config"]
        case ["python", "scripts/launch/ray_train.py", *_]:
            return ["train", *words[words.index("--") + 1 :], "--print-config"]
        case ["python", "-m", *rest] | ["mupax", *rest]:
            return rest
    raise AssertionError(f"the documents say {words}, and no test knows how to check it")


def run_mupax(words: list[str]) -> int:
    """Run a command of mupax: quickly if it trains or takes many batches."""
    if words[0] == "serve":
        with unittest.mock.patch.object(server.Server, "serve_forever"):
            return mupax.main([*words, "--port", "0"])
    if words[0] == "noise":
        return mupax.main([*words, "--batches", "3"])
    # A plan from the committed evidence takes no flag of a recipe.
    from_evidence = words[:2] == ["plan", "--model"] and "--from" not in words
    trains = words[0] in TRAINS or words[:2] == ["presets", "dynamics"]
    if trains and not from_evidence and not RUNS_NOTHING.intersection(words):
        words = [*words, "--dry-run"]
    return mupax.main(words)


def test_the_documents_have_commands():
    assert {"make train", "make test"} <= set(shell_lines())


@pytest.mark.parametrize("line", shell_lines())
def test_a_command_works(line: str, tmp_path: Path, trained: Path, request: pytest.FixtureRequest):
    if line.startswith("mupax ") and "gs://bucket" in line:
        line = line.replace("gs://bucket", request.getfixturevalue("bucket"))
    shown = io.StringIO()
    errors = io.StringIO()
    copy_read(trained, tmp_path, line)
    with (
        reader_folder(tmp_path),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(errors),
    ):
        code = run(line)
    assert code == 0, f"{line}\n{shown.getvalue()[-2000:]}\n{errors.getvalue()[-2000:]}"
    # After two steps a model writes spaces.
    blank = line.startswith(("make ", "scripts/", "pip ")) or " generate " in line
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
    with reader_folder(tmp_path), contextlib.redirect_stderr(io.StringIO()):
        assert run(line) != 0


@pytest.mark.parametrize("document", python_documents())
def test_python_blocks_run(document: str, tmp_path: Path, trained: Path):
    for block in blocks(document, "python"):
        copy_read(trained, tmp_path, block)
        with contextlib.chdir(tmp_path):
            exec(compile(block, document, "exec"), {"__name__": "__main__"})


def test_presets_need_neither_our_models_nor_our_loop():
    longest_lines = 30
    examples = blocks("README.md", "python") + blocks("docs/howto/other_code.md", "python")
    examples = [block for block in examples if "mup.scales(" in block]
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
ELSEWHERE = ("runs/", "WORKDIR/", "splash_attention/")
"""What a run writes, and JAX's own kernels in what the compiler says."""


def missing(document: str, text: str) -> list[str]:
    """Return the files and modules that a document names and that do not exist.

    Args:
        document: Path of the document from the root.
    """
    # Paths start from these folders; a field of a config names its test from `tests/`.
    folders = (ROOT, ROOT / "docs", (ROOT / document).parent, ROOT / "tests")
    elsewhere = set(in_other_repositories()) if document == "docs/reference/tuned.md" else set()
    names = NAMED.findall(re.sub(r"^(---|\+\+\+) [ab]/", "", text, flags=re.MULTILINE))
    absent = []
    for name in names:
        if name.startswith("mupax.") and not name.endswith((".py", ".md")):
            if not is_module(name):
                absent.append(name)
        elif name in elsewhere or name.startswith(ELSEWHERE):
            continue
        elif not any((folder / name).exists() for folder in folders):
            absent.append(name)
    return absent


def is_module(name: str) -> bool:
    with contextlib.suppress(AttributeError, ImportError):
        pkgutil.resolve_name(name)
        return True
    with contextlib.suppress(ImportError):  # an extra may be missing that the module needs
        return importlib.util.find_spec(name) is not None
    return False


def in_other_repositories() -> list[str]:
    """Return the files that published tuned presets name as their sources in other repositories."""
    texts = [path.read_text() for path in find.PUBLISHED.glob("*.json")]
    texts += [left.looked_at for left in published.LEFT_OUT]
    return NAMED.findall("\n".join(texts))


@pytest.mark.parametrize("document", sorted({*DOCUMENTS, "CHANGELOG.md"}))
def test_files_and_modules_named_in_the_documents_exist(document: str):
    assert missing(document, (ROOT / document).read_text()) == []


def test_control_a_moved_file_is_missed():
    text = "`train/loop.py`, `train/run/loop.py:12`, [x](docs/howto/running.md), "
    text += "mupax.train.loop and `mupax.train.run.loop`"
    assert missing("README.md", text) == ["train/loop.py", "mupax.train.loop"]
