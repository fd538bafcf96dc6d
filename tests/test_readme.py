"""What the documents tell a person to type works: shell lines and Python blocks are read from them and run.

Cheap variants stand in for what is slow: a training line gets `--dry-run`, a `make` line `make --dry-run`. Installing
commands are only looked at. Everything else runs as written, in this process, in an empty folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS_NOTHING = ("--dry-run", "--print-config", "--help")
USES_A_RUN = ("checkpoints", "eval", "generate", "grow")
"""Commands of `python -m train` that are cheap, and are run as written on what `make train` leaves, here after two steps."""


def blocks(document: str, language: str) -> list[str]:
    found = FENCE.findall((ROOT / document).read_text())
    assert all(name for name, _ in found), f"{document} has a fenced block without a language"
    return [body for name, body in found if name == language]


def shell_lines() -> list[str]:
    texts = [block.replace("\\\n", " ") for document in DOCUMENTS for block in blocks(document, "sh")]
    return list(dict.fromkeys(line.strip() for text in texts for line in text.splitlines() if line.strip()))


@contextlib.contextmanager
def folders_of_the_reader(path: Path) -> Iterator[None]:
    """The empty folder a person types in, with the text and the images the documents speak of."""
    (path / "tuned").mkdir()
    # What the sweep before would have left.
    saved = json.loads((ROOT / "presets" / "tuned" / "mup.lm-python-v1.json").read_text())
    (path / "tuned" / "mup.my-lm.json").write_text(json.dumps({**saved, "name": "my-lm"}))
    (path / "my_texts").mkdir()
    (path / "my_texts" / "a.txt").write_text("Something to read. " * 2000)
    for name in ("cats", "dogs"):
        (path / "my_images" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (12, 12), (40 * number, 100, 0)).save(path / "my_images" / name / f"{number}.png")
    with contextlib.chdir(path):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir as `make train` leaves it, but for the number of steps."""
    folder = tmp_path_factory.mktemp("trained")
    words = (
        "train lm-tiny --steps 2 --optimizer.warmup-steps 1 --data.batch-size 8 --data.eval-examples 8 --log.no-samples"
    )
    with folders_of_the_reader(folder), contextlib.redirect_stdout(io.StringIO()):
        assert import_module("mupax.train.__main__").main([*words.split()[1:], "--workdir", "runs/lm-tiny"]) == 0
    return folder / "runs"


def run(line: str) -> int:
    """Exit code of one command of the documents."""
    words = shlex.split(line)
    while "=" in words[0]:
        variable, value = words.pop(0).split("=", 1)
        assert value in os.environ[variable], f"the tests run without {variable}={value}"
    if words[0] == "make":
        assert len(words) > 1
        return subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, check=False).returncode
    if words[0].endswith("python"):
        assert words[1] == "-m"
        words = ["mupax", *words[2:]]
    assert words[0] == "mupax", f"the documents say {line!r}, and nothing here knows how to check it"
    command, arguments = words[1], words[2:]
    if command == "train" and arguments[0] not in USES_A_RUN and not set(arguments) & set(RUNS_NOTHING):
        arguments.append("--dry-run")
    main: Callable[[list[str]], int] = import_module(f"mupax.{command}.__main__").main
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_documents_have_commands():
    assert {"make train", "make test"} <= set(shell_lines())


@pytest.mark.parametrize("line", shell_lines())
def test_a_command_works(line: str, tmp_path: Path, request: pytest.FixtureRequest):
    shown, errors = io.StringIO(), io.StringIO()
    if re.search(rf"train ({'|'.join(USES_A_RUN)}) |--init-from", line):
        shutil.copytree(request.getfixturevalue("trained"), tmp_path / "runs")
    with folders_of_the_reader(tmp_path), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        code = run(line)
    assert code == 0, f"{line}\n{shown.getvalue()[-2000:]}\n{errors.getvalue()[-2000:]}"
    assert line.startswith("make ") or shown.getvalue().strip(), f"{line} says nothing"


@pytest.mark.parametrize(
    "line", ["python -m train lm-tiny --no-such-flag 1", "python -m presets table no-such --model gpt2", "make no-such"]
)
def test_control_a_wrong_command_fails(line: str, tmp_path: Path):
    with folders_of_the_reader(tmp_path), contextlib.redirect_stderr(io.StringIO()):
        assert run(line) != 0


def test_python_blocks_run(tmp_path: Path):
    examples = blocks("README.md", "python")
    assert examples
    for block in examples:
        with contextlib.chdir(tmp_path):
            exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_presets_need_neither_our_models_nor_our_loop():
    longest_lines = 20
    examples = [block for block in blocks("README.md", "python") if "presets" in block]
    assert examples
    for block in examples:
        assert (
            len([line for line in block.splitlines() if line.strip()]) <= longest_lines
        )  # the formatter adds blank ones
        assert "nnx" in block
        assert not re.search(r"^\s*from mupax(\.| import )(zoo|train)\b", block, re.MULTILINE)


def test_files_named_in_the_documents_exist():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!http|#)([^)]+)\)", (ROOT / document).read_text()):
            assert (ROOT / target).exists(), f"{document} links to {target}"
