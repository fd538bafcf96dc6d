"""Count the modules of ours that a plain run imports, read when its process ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = 70
"""Largest number of modules with code. Raise it for a new idea that every run needs, not for a split file."""
UNREAD = (
    "buckets",
    "presets.tuned",
    "train.pods",
    "train.reuse",
    "train.studies",
    "zoo.huggingface.config",
)
"""Modules that no plain run reads."""
FLAGS = (
    "vit-digits --model.width 8 --model.num-heads 2 --model.depth 1 --steps 2 "
    "--optimizer.warmup-steps 1 --data.batch-size 8 --data.eval-examples 8 --log.no-progress "
    "--log.no-samples --log.no-tensorboard --workdir"
)
PROGRAM = """
import atexit, json, sys

def write():
    files = {m.__file__: n for n, m in sys.modules.items() if n.startswith("mupax.") and getattr(m, "__file__", None)}
    open("loaded.json", "w").write(json.dumps({n: len(open(f).read().splitlines()) for f, n in files.items()}))

atexit.register(write)
from mupax.train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Modules of ours with code. Packages whose file is a docstring of one line do not count."""
    folder, root = tmp_path_factory.mktemp("loaded"), Path(__file__).resolve().parents[3]
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(root)!r}){PROGRAM}",
        *FLAGS.split(),
        "run",
    ]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # A run that nothing disturbs has nothing to say on standard error.
    assert not done.stderr
    lines = json.loads((folder / "loaded.json").read_text())
    return [name for name, count in sorted(lines.items()) if count > 1]


def test_a_plain_run_loads_few_modules(loaded: list[str]) -> None:
    names = "\n".join(loaded)
    assert len(loaded) <= MODULES, f"{names}\n{len(loaded)} modules"


def test_a_plain_run_loads_no_command_and_nothing_of_other_runs(loaded: list[str]) -> None:
    assert [
        name for name in loaded if any(name.startswith(f"mupax.{part}") for part in UNREAD)
    ] == []
