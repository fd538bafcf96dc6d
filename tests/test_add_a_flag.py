"""With the edits of docs/howto/add_a_flag.md, flags train and the tests that the page names pass.

`python -m tests.test_add_a_flag` writes the table of checkpoint flags in docs/howto/running.md.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mupax.config_fields import CONSEQUENCES
from mupax.train.config.sections import CheckpointConfig

ROOT = Path(__file__).resolve().parents[1]
RUNNING = ROOT / "docs" / "howto" / "running.md"
PAGE = (ROOT / "docs" / "howto" / "add_a_flag.md").read_text()
EDITS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TESTS = ["tests/train/run/test_config_fields.py", "-k", "clip_value or declares"]
ON_RESUME = {"refused": "is refused", "announced": "prints old -> new", "silent": "prints nothing"}
RUN = (
    "train lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 "
    "--data.batch-size 8 --data.name text:words.txt --data.eval-examples 8 --steps 4 "
    "--optimizer.warmup-steps 1 --log.no-samples --log.no-tensorboard --workdir run "
    "--checkpoint.keep 1 --checkpoint.keep-steps 1 3 --optimizer.clip-value 0.1"
)
PROGRAM = f"""
import pytest
from mupax.__main__ import main

assert main({RUN.split()}) == 0
assert main("checkpoints list run".split()) == 0
raise SystemExit(pytest.main({["-q", "--assert=plain", *TESTS]}))
"""
"""One process for all three, since each would import JAX."""


def with_flags(page: str) -> str:
    """Return docs/howto/running.md with the table of checkpoint flags of the fields."""
    tree = ast.parse((ROOT / "train" / "config" / "sections.py").read_text())
    classes = [item for item in tree.body if isinstance(item, ast.ClassDef)]
    (config,) = [item for item in classes if item.name == "CheckpointConfig"]
    lines = ["| flag | default | what it does |", "|---|---|---|"]
    for field, text in itertools.pairwise(config.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            name = ast.unparse(field.target)
            default = getattr(CheckpointConfig(), name)
            shown = "" if default is None else default
            help_text = ast.literal_eval(text.value)
            lines.append(f"| `--checkpoint.{name.replace('_', '-')}` | {shown} | {help_text} |")
    begin = "<!-- flags: begin -->\n"
    end = "<!-- flags: end -->"
    return page.partition(begin)[0] + begin + "\n".join(lines) + "\n" + end + page.partition(end)[2]


def source_copy(folder: Path) -> Path:
    """Return a copy of the source and its tests, without documents."""
    for name in ("mupax", "train", "zoo", "presets", "tests", "scripts"):
        skipped = shutil.ignore_patterns("__pycache__", "goldens")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.core
def test_the_table_of_effects_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (yes|no) \|$", PAGE, re.MULTILINE)
    code = [
        (effect, row.meaning, ON_RESUME[row.on_resume], "yes" if row.names_point else "no")
        for effect, row in CONSEQUENCES.items()
    ]
    assert rows == code


@pytest.mark.core
def test_the_table_of_checkpoint_flags_is_that_of_the_fields() -> None:
    text = RUNNING.read_text()
    assert with_flags(text) == text, "python -m tests.test_add_a_flag writes it anew"
    assert "| `--checkpoint.keep-every` |" in text


@pytest.mark.core
def test_each_edit_changes_one_file() -> None:
    assert [re.findall(r"^\+\+\+ b/(\S+)$", edit, re.MULTILINE) for edit in EDITS] == [
        ["train/config/sections.py"],
        ["train/core/optimizer.py"],
        ["train/config/sections.py"],
    ]


def applied(edits: Sequence[str], folder: Path) -> None:
    """Apply the page's edits, in order, to the files in a folder."""
    for edit in edits:
        words = ["git", "apply", "--unidiff-zero", "--recount", "-"]
        done = subprocess.run(
            words, cwd=folder, input=edit, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.core
def test_the_edits_fit_the_files_of_today(tmp_path: Path) -> None:
    for name in ("train/config/sections.py", "train/core/optimizer.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    applied(EDITS, tmp_path)
    with pytest.raises(AssertionError, match="patch failed"):
        applied(EDITS[:1], tmp_path)


@pytest.mark.slow
def test_the_edits_make_flags_that_train_and_pass_their_tests(tmp_path: Path) -> None:
    folder = source_copy(tmp_path)
    applied(EDITS, folder)
    (folder / "words.txt").write_text("a few words to train on. " * 300)
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step 4/4" in done.stdout
    listed = [line.split()[0] for line in done.stdout.splitlines() if " listed " in line]
    assert listed == ["1", "3"]
    assert " passed" in done.stdout


if __name__ == "__main__":
    RUNNING.write_text(with_flags(RUNNING.read_text()))
