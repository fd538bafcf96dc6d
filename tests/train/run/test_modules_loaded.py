"""What a plain run imports of ours, counted when its process ends: what a newcomer would have to open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULES, LINES = 92, 15_800
"""Most modules with code, and most lines of them."""
UNREAD = ("presets.tuned", "train.pods", "train.reuse", "train.studies", "zoo.huggingface.config")
"""What no plain run reads."""
FLAGS = (
    "vit-digits --steps 2 --optimizer.warmup-steps 1 --data.batch-size 8 --data.eval-examples 8 --log.no-progress "
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
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Module of ours to its lines; packages whose file is a line of words do not count."""
    folder, root = tmp_path_factory.mktemp("loaded"), Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}){PROGRAM}", *FLAGS.split(), "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = json.loads((folder / "loaded.json").read_text())
    return {name: count for name, count in sorted(lines.items()) if count > 1}


def test_a_plain_run_loads_few_modules(loaded: dict[str, int]) -> None:
    text = "\n".join(f"{count:5} {name}" for name, count in loaded.items())
    total = sum(loaded.values())
    assert (len(loaded) <= MODULES, total <= LINES) == (True, True), f"{text}\n{len(loaded)} modules, {total} lines"


def test_a_plain_run_loads_no_command_and_nothing_of_other_runs(loaded: dict[str, int]) -> None:
    assert [name for name in loaded if any(name.startswith(f"mupax.{part}") for part in UNREAD)] == []
